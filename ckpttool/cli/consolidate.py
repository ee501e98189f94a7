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
    help="The optimizer's fp32 master weights, or the model's own copies (stages 1 and 2).  [default: masters]",
)
@click.option("--max-shard-size", type=options.Size(), help="Split into files of at most this size.  [default: 5GB]")
@options.include_option
@options.exclude_option
@click.option("--exclude-frozen", is_flag=True, help="Leave out frozen parameters.")
@click.option("--adapter-only", is_flag=True, help="Write the trained PEFT adapter, as PEFT does.")
@click.option("--optimizer", is_flag=True, help="Also write the optimizer's states, as safetensors.")
@click.option("--merge-lora", is_flag=True, help="Merge the trained LoRA adapter into the base model, as PEFT does.")
@click.option(
    "--base", metavar="SRC", help="The base model for --merge-lora.  [default: the frozen weights in the checkpoint]"
)
@click.option("--adapter", multiple=True, metavar="NAME", help="Adapter to merge, if there are several (repeatable).")
@click.option(
    "--rename",
    multiple=True,
    metavar="RULE",
    help="Rename tensors: 's/PATTERN/REPLACEMENT/', or a ready-made map: module, compile, fsdp, peft "
    "(repeatable, applied in order).",
)
@click.option("--rename-map", metavar="FILE", help="JSON file of new names by old ones, applied before --rename.")
@click.option("--prove", is_flag=True, help="Digest the source and the output, and commit only if they are equal.")
@options.check_options
@options.dry_run_option
@options.resume_option
@click.option("--overwrite", is_flag=True, help="Replace weights that OUT already holds.")
@options.jobs_option
@options.memory_option
@options.ray_option
@options.json_option
@options.trust_option
@options.storage_option
@options.debug_option
def consolidate(src: tuple[str, ...], out: str, as_json: bool, **given: Any) -> None:
    """Merge the shards of SRC into whole weights in the directory OUT.

    Parameters come from the fp32 master weights. OUT gets the names that Hugging Face's libraries look for, and the
    configuration and tokenizer in the checkpoint's root. OUT appears complete or not at all.
    """
    import ckpttool
    from ckpttool.cli._output import print_json, progress_bar
    from ckpttool.cli._reports import print_consolidate_report

    with progress_bar("consolidate") as progress:
        report = ckpttool.consolidate(src, out, progress=progress, **options.chosen(given))
    if as_json:
        print_json(report)
    else:
        print_consolidate_report(report)
