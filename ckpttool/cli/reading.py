"""The commands that read checkpoints: ``inspect``, ``verify``, ``diff``, ``digest`` and ``extract``."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ckpttool.cli import _options as options

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint

FOUND = 1
"""Exit code of ``verify`` for a damaged checkpoint, and of ``diff`` for different ones; failures have another."""
VIEWS = ("params", "ranks", "files", "map")
"""The views of ``inspect``, in the order in which they are printed."""


@click.command(cls=options.Command, short_help="Show the content of a checkpoint.")
@options.source_argument
@options.shared("tag")
@click.option("--params", is_flag=True, help="One row for each parameter, buffer and tied name.")
@click.option("--ranks", is_flag=True, help="One row for each rank, with its content.")
@click.option("--files", is_flag=True, help="One row for each file.")
@click.option(
    "--param",
    "name",
    metavar="NAME",
    shell_complete=options.complete_names,
    help="Show the byte ranges of one parameter.",
)
@click.option("--map", is_flag=True, help="Draw the content of each rank, as wide as the terminal.")
@options.shared("trust_names")
def inspect(src: Any, name: str | None, **given: Any) -> None:
    """Show the content of a checkpoint; reads a few kilobytes, for any size.

    Without a view: format, topology, versions, totals and parameter groups. Several are printed in turn.
    """
    views = [view for view in VIEWS if given.pop(view)]
    if views and name:
        raise click.UsageError(f"choose one of --{views[0]} and --param")
    import ckpttool
    from ckpttool.cli._output import is_text, show

    checkpoint = ckpttool.inspect(src, **options.chosen(given))
    if is_text() and (views or name is not None):
        _print_views(checkpoint, views, name)
    else:
        show(checkpoint, plain=partial(_plain, checkpoint, name))


def _plain(checkpoint: Checkpoint, name: str | None) -> dict[str, Any]:
    from ckpttool.analysis.json_report import describe, describe_parameter

    return describe(checkpoint) if name is None else describe_parameter(checkpoint, name)


def _print_views(checkpoint: Checkpoint, views: list[str], name: str | None) -> None:
    from ckpttool.analysis import texts
    from ckpttool.cli._map import print_map
    from ckpttool.cli._output import print_blocks, print_line

    for number, view in enumerate(views):
        if number:
            print_line("")
        if view == "map":
            print_map(checkpoint)
        else:
            print_blocks({"params": texts.parameters, "ranks": texts.ranks, "files": texts.files}[view](checkpoint))
    if name is not None:
        print_blocks(texts.parameter(checkpoint, name))
    print_blocks(texts.notes(checkpoint))


@click.command(cls=options.Command, short_help="Check that a checkpoint is whole and sound.")
@options.source_argument
@options.shared("tag")
@click.option(
    "--deep",
    is_flag=True,
    help="Read every byte: checksums, NaN and infinity, 16-bit copies against fp32 master weights.",
)
@options.shared("jobs", "trust_names")
def verify(src: Any, **given: Any) -> None:
    """Check that a checkpoint is complete and sound: every rank's file exists, is intact and agrees with the others.

    Prints one line for each finding and exits with 1 if there is any.
    """
    from dataclasses import replace

    import ckpttool
    from ckpttool.analysis.json_report import as_plain
    from ckpttool.cli._errors import hint_with_flags
    from ckpttool.cli._output import progress_bar, show

    with progress_bar("verify") as progress:
        report = ckpttool.verify(src, progress=progress, **options.chosen(given))
    findings = (replace(f, hint=hint_with_flags(f.hint, f.options)) for f in report.findings)
    report = replace(report, findings=tuple(findings))
    show(report, plain=lambda: {"sound": report.sound, **as_plain(report)})
    if not report.sound:
        raise click.exceptions.Exit(FOUND)


@click.command(cls=options.Command, short_help="Compare two checkpoints, of any formats and topologies.")
@click.argument("a", type=click.Path(readable=False))
@click.argument("b", type=click.Path(readable=False))
@click.option("--tag-a", metavar="TAG", help="Tag of the checkpoint in A.  [default: the tag in latest]")
@click.option("--tag-b", metavar="TAG", help="Tag of the checkpoint in B.  [default: the tag in latest]")
@click.option("--rtol", type=click.FloatRange(min=0), help="Relative tolerance.  [default: 0]")
@click.option("--atol", type=click.FloatRange(min=0), help="Absolute tolerance.  [default: 0]")
@options.shared("include", "exclude")
@click.option(
    "--all", is_flag=True, help="Also compare steps, learning rates, the scheduler, the loss scale and client state."
)
@options.shared("jobs", "trust_names")
def diff(a: str, b: str, **given: Any) -> None:
    """Compare the weights and optimizer states of A and B by name, for any formats and topologies.

    Weights are the fp32 master weights, if present. Prints the differences and exits with 1, or with 0 if A and B are
    equal.
    """
    import ckpttool
    from ckpttool.cli._output import progress_bar, show

    with progress_bar("diff") as progress:
        report = ckpttool.diff(a, b, progress=progress, **options.chosen(given))
    names = ("a", "b", "equal", "tensors", "notes", "others")
    show(report, plain=lambda: {name: getattr(report, name) for name in names})
    if not report.equal:
        raise click.exceptions.Exit(FOUND)


@click.command(cls=options.Command, short_help="Digest all values, the same however they are sharded.")
@options.source_argument
@click.option(
    "--tensors", "view", flag_value="tensors", help="One row for each tensor, with its own digest of 128 bits."
)
@options.shared("tag", "jobs", "trust_names")
def digest(src: Any, view: str | None, **given: Any) -> None:
    """Print digests of the names, shapes and values of SRC: of its weights and of its optimizer states.

    Stage, number of ranks and file format do not change them. Reads every value once.
    """
    import ckpttool
    from ckpttool.cli._output import progress_bar, show
    from ckpttool.model.items import tensor_table

    with progress_bar("digest") as progress:
        found = ckpttool.digest(src, progress=progress, **options.chosen(given))

    def plain() -> dict[str, Any]:
        each = {key: {name: str(one) for name, one in own.items()} for key, own in found.tensors.items()}
        return {"weights": found.weights, "optimizer": found.optimizer, "tensors": each}

    show(found, plain=plain, blocks=(lambda: [tensor_table(found.tensors)]) if view else None)


@click.command(cls=options.Command, short_help="Write one tensor to a file.")
@options.source_argument
@click.argument("name", shell_complete=options.complete_names)
@options.out_argument
@click.option(
    "--state", metavar="STATE", help="weights, fp32, module, or the optimizer's: exp_avg, ...  [default: weights]"
)
@click.option("--index", metavar="INDEX", help="Only a slice of it, as in Python: '0:10, 3'.")
@options.shared("tag")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@options.shared("check", "trust_names")
def extract(src: Any, name: str, out: str, index: str | None, **given: Any) -> None:
    """Write the tensor NAME of SRC to the file OUT, of the kind of its suffix: .safetensors, .npy or .pt.

    Reads only the bytes of the tensor.
    """
    import ckpttool
    from ckpttool.cli._output import show

    report = ckpttool.extract(src, name, out, index=_index(index), **options.chosen(given))
    show(report)


def _index(text: str | None) -> tuple[int | slice, ...] | None:
    """Parse an index in Python's notation between brackets."""
    if text is None:
        return None
    result: list[int | slice] = []
    for item in text.strip("[] ").split(","):
        match = re.fullmatch(r"\s*(-?\d+)?\s*(:)?\s*(-?\d+)?\s*", item)
        start, colon, stop = match.groups() if match else (None, None, None)
        if match is None or not (colon or start) or (stop and not colon):
            raise click.BadParameter(f"{text!r} is not an index such as '0:10, 3'", param_hint="--index")
        bounds = [None if bound is None else int(bound) for bound in (start, stop)]
        result.append(slice(*bounds) if colon else int(start or 0))
    return tuple(result)
