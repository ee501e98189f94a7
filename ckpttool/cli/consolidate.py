"""``ckpttool consolidate``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Merge the shards into whole weights.")
@options.sources_argument
@options.out_argument
@click.option("--to", type=click.Choice(["safetensors", "torch"]), required=True, help="Kind of file to write.")
@options.tag_option
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Type of the parameters.  [default: fp32]")
@click.option(
    "--weights",
    type=click.Choice(["masters", "module"]),
    help="From the optimizer's masters, or the model's own copies (stages 1 and 2).  [default: masters]",
)
@click.option("--max-shard-size", type=options.Size(), help="Split into files of at most this size.  [default: 5GB]")
@options.include_option
@options.exclude_option
@click.option("--exclude-frozen", is_flag=True, help="Leave out frozen parameters.")
@click.option("--adapter-only", is_flag=True, help="Write the PEFT adapter that was trained, as PEFT does.")
@click.option("--prove", is_flag=True, help="Digest what was read and what was written; commit only if they agree.")
@options.check_options
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace weights that OUT already holds.")
@options.jobs_option
@options.memory_option
@options.ray_option
@options.json_option
@options.trust_option
@options.storage_option
@options.debug_option
def consolidate(
    src: tuple[str, ...],
    out: str,
    to: str,
    tag: str | None,
    dtype: str | None,
    weights: str | None,
    max_shard_size: int | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    exclude_frozen: bool,
    adapter_only: bool,
    prove: bool,
    check: str | None,
    no_check: bool,
    dry_run: bool,
    overwrite: bool,
    jobs: int | None,
    memory: int | None,
    ray: str | None,
    as_json: bool,
    trust_names: bool,
    storage_options: dict[str, Any] | None,
) -> None:
    """Merge the shards of SRC into whole weights in the directory OUT.

    Parameters come from the fp32 masters; OUT gets the names that Hugging Face's libraries look for, and the
    configuration and tokenizer that lie beside the checkpoint. OUT appears whole or not at all.
    """
    import ckpttool
    from ckpttool.cli._output import print_json, progress_bar
    from ckpttool.cli._reports import print_copy_report

    given = options.chosen(
        check=options.checked(check, no_check),
        storage_options=storage_options,
        dtype=dtype,
        weights=weights,
        max_shard_size=max_shard_size,
        jobs=jobs,
        memory=memory,
        ray=ray,
    )
    with progress_bar("consolidate") as progress:
        report = ckpttool.consolidate(
            src,
            out,
            to="torch" if to == "torch" else "safetensors",
            tag=tag,
            include=include,
            exclude=exclude,
            exclude_frozen=exclude_frozen,
            adapter_only=adapter_only,
            prove=prove,
            dry_run=dry_run,
            overwrite=overwrite,
            trust_names=trust_names,
            progress=progress,
            **given,
        )
    if as_json:
        print_json(report)
    else:
        print_copy_report(report)
