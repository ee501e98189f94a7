"""``ckpttool convert``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Write a checkpoint for another number of ranks, stage or loader.")
@options.sources_argument
@options.out_argument
@click.option("--to", type=click.Choice(["zero", "universal", "dcp"]), required=True, help="What is to load it.")
@options.tag_option
@click.option("--world-size", type=click.IntRange(1, 1 << 20), help="Data-parallel ranks that will load it (for zero).")
@click.option("--stage", type=click.IntRange(1, 3), help="ZeRO stage of the run that will.  [default: the source's]")
@click.option(
    "--sub-group-size", type=click.IntRange(1), help="Of that run's configuration (stage 3).  [default: the source's]"
)
@click.option(
    "--round-robin/--no-round-robin",
    default=None,
    help="Whether that run has round_robin_gradients.  [default: as the source had]",
)
@click.option(
    "--expert-parallel",
    type=click.IntRange(1),
    help="Ranks that run spreads experts over (autoep_size, ep_size).  [default: the source's]",
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="What that run computes in, for weights alone and for DCP.  [default: what weights alone are in]",
)
@click.option("--prove", is_flag=True, help="Digest what was read and what was written; commit only if they agree.")
@options.check_options
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@click.option("--resume", is_flag=True, help="Go on from what a killed run of the same conversion has completed.")
@options.jobs_option
@options.memory_option
@options.ray_option
@options.json_option
@options.trust_option
@options.storage_option
@options.debug_option
def convert(
    src: tuple[str, ...],
    out: str,
    to: str,
    tag: str | None,
    world_size: int | None,
    stage: int | None,
    sub_group_size: int | None,
    round_robin: bool | None,
    expert_parallel: int | None,
    dtype: str | None,
    prove: bool,
    check: str | None,
    no_check: bool,
    dry_run: bool,
    resume: bool,
    jobs: int | None,
    memory: int | None,
    ray: str | None,
    as_json: bool,
    trust_names: bool,
    storage_options: dict[str, Any] | None,
) -> None:
    """Write the checkpoint SRC anew in OUT, bit for bit the same values.

    For another number of ranks or another stage (zero: plain load_checkpoint reads it), for any topology (universal:
    load_universal reads it), or for torch.distributed.checkpoint (dcp). OUT appears whole or not at all.
    """
    import ckpttool
    from ckpttool.cli._output import print_json, progress_bar
    from ckpttool.cli._reports import print_convert_report

    if to == "zero" and world_size is None:
        raise click.UsageError("--to zero needs --world-size")
    for_zero = {
        "--world-size": world_size, "--stage": stage, "--sub-group-size": sub_group_size, "--round-robin": round_robin,
        "--expert-parallel": expert_parallel, "--dtype": dtype,
    }  # fmt: skip
    useless = [name for name, value in for_zero.items() if value is not None and to != "zero"]
    if useless:
        raise click.UsageError(f"{useless[0]} goes with --to zero alone")
    if prove and dry_run:
        raise click.UsageError("--prove needs what --dry-run does not write")
    given = options.chosen(
        check=options.checked(check, no_check),
        storage_options=storage_options,
        world_size=world_size,
        stage=stage,
        sub_group_size=sub_group_size,
        round_robin=round_robin,
        expert_parallel=expert_parallel,
        dtype=dtype,
        jobs=jobs,
        memory=memory,
        ray=ray,
    )
    with progress_bar("convert") as progress:
        report = ckpttool.convert(
            src,
            out,
            to="zero" if to == "zero" else "universal" if to == "universal" else "dcp",
            tag=tag,
            prove=prove,
            dry_run=dry_run,
            resume=resume,
            trust_names=trust_names,
            progress=progress,
            **given,
        )
    if as_json:
        print_json(report)
    else:
        print_convert_report(report)
