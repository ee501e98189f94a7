"""``ckpttool extract``."""

from __future__ import annotations

import re
from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Write one tensor to a file.")
@options.sources_argument
@click.argument("name")
@click.option("-o", "--out", type=click.Path(), required=True, help="File to write: .safetensors, .npy or .pt.")
@click.option(
    "--state", metavar="STATE", help="weights, fp32, module, or the optimizer's: exp_avg, ...  [default: weights]"
)
@click.option("--part", metavar="INDEX", help="Only a slice of it, as in Python: '0:10, 3'.")
@options.tag_option
@options.check_options
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
@options.trust_option
@options.storage_option
@options.debug_option
def extract(src: tuple[str, ...], name: str, out: str, part: str | None, **given: Any) -> None:
    """Write the tensor NAME of SRC to a file; reads only its bytes."""
    import ckpttool
    from ckpttool.cli._output import print_line
    from ckpttool.units import format_size

    written = ckpttool.extract_to_file(src, name, out, part=_index(part), **options.chosen(given))
    from ckpttool.cli._reports import print_checks

    print_line(f"{out}: {written.state} of {name}, {written.dtype}, {written.shape}, {format_size(written.nbytes)}")
    print_checks(written.checks)


def _index(text: str | None) -> tuple[int | slice, ...] | None:
    """Parse an index in Python's notation between brackets."""
    if text is None:
        return None
    result: list[int | slice] = []
    for item in text.strip("[] ").split(","):
        match = re.fullmatch(r"\s*(-?\d+)?\s*(:)?\s*(-?\d+)?\s*", item)
        start, colon, stop = match.groups() if match else (None, None, None)
        if match is None or not (colon or start) or (stop and not colon):
            raise click.BadParameter(f"{text!r} is no index such as '0:10, 3'", param_hint="--part")
        bounds = [None if bound is None else int(bound) for bound in (start, stop)]
        result.append(slice(*bounds) if colon else int(start or 0))
    return tuple(result)
