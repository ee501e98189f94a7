"""The commands that read checkpoints: ``inspect``, ``verify``, ``diff``, ``stats`` and ``extract``."""

from __future__ import annotations

import re
from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Show the content of a checkpoint.")
@options.sources_argument
@options.tag_option
@click.option("--params", "view", flag_value="params", help="One row for each parameter, buffer and tied name.")
@click.option("--ranks", "view", flag_value="ranks", help="One row for each rank: what it holds.")
@click.option("--files", "view", flag_value="files", help="One row for each file.")
@click.option("--param", "name", metavar="NAME", help="Show the byte ranges of one parameter.")
@click.option("--map", "view", flag_value="map", help="Draw what each rank holds, as wide as the terminal.")
@options.html_options
@click.option("--verify", is_flag=True, help="Verify it too, and show the findings in the page.")
@click.option("--digest", is_flag=True, help="Digests of all values, the same however they are sharded (reads them).")
@options.json_option
@options.trust_option
@options.common_options
def inspect(
    src: tuple[str, ...], view: str | None, name: str | None, digest: bool, as_json: bool, **given: Any
) -> None:
    """Show the content of a checkpoint; reads a few kilobytes, for any size.

    Without a view: format, topology, versions, totals and parameter groups. Several SRC are directories of one
    checkpoint, each with the files of some ranks.
    """
    page = options.page_of(given, as_json, "verify")
    _check_usage(view, name, digest, page)
    if digest:
        _print_digest(src, as_json, given)
    elif page["html"] is not None:
        _write_checkpoint_page(src, page, given)
    else:
        _print(src, view, name, as_json, given)


def _check_usage(view: str | None, name: str | None, digest: bool, page: dict[str, Any]) -> None:
    """Refuse options that exclude each other.

    Raises:
        click.UsageError: Two options exclude each other.
    """
    if view and name:
        raise click.UsageError(f"choose one of --{view} and --param")
    if digest and (view or name):
        raise click.UsageError("--digest goes with no view")
    if page["html"] is not None and (view or name or digest):
        raise click.UsageError("--html goes with no view, and not with --digest")


def _print(src: tuple[str, ...], view: str | None, name: str | None, as_json: bool, given: dict[str, Any]) -> None:
    import ckpttool
    from ckpttool.cli._reports import print_checkpoint, print_checkpoint_json

    checkpoint = ckpttool.inspect(src, **options.chosen(given))
    if as_json:
        print_checkpoint_json(checkpoint, name)
    elif view == "map":
        from ckpttool.cli._map import print_map

        print_map(checkpoint)
    else:
        print_checkpoint(checkpoint, view, name)


def _write_checkpoint_page(src: tuple[str, ...], page: dict[str, Any], given: dict[str, Any]) -> None:
    from ckpttool.api._pages import page_of_source
    from ckpttool.cli._errors import hint_with_flags
    from ckpttool.cli._reports import write_page

    options.check_page(page, given)
    data, report = page_of_source(src, verify=page["verify"], hint=hint_with_flags, **options.chosen(given))
    write_page(page, data, given)
    if report is not None and report.findings:
        raise click.exceptions.Exit(1)


def _print_digest(src: tuple[str, ...], as_json: bool, given: dict[str, Any]) -> None:
    import ckpttool
    from ckpttool.cli._output import print_facts, print_json, progress_bar

    with progress_bar("digest") as progress:
        found = ckpttool.digest(src, progress=progress, **options.chosen(given))
    if as_json:
        print_json(found)
    else:
        print_facts([("weights", found.weights), ("optimizer", found.optimizer or "no states")])


@click.command(short_help="Check that a checkpoint is whole and sound.")
@options.sources_argument
@options.tag_option
@click.option(
    "--deep",
    is_flag=True,
    help="Read every byte: checksums, NaN and infinity, 16-bit copies against fp32 master weights.",
)
@click.option(
    "--key",
    metavar="FILE|env:NAME",
    help="Also check the signature with the key in a file or an environment variable; reads every byte.",
)
@options.jobs_option
@options.json_option
@options.trust_option
@options.common_options
def verify(src: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Check that a checkpoint is complete and sound: every rank's file exists, is intact and agrees with the others.

    Prints one line for each finding and exits with 1 if there is any.
    """
    from dataclasses import replace

    import ckpttool
    from ckpttool.cli._errors import hint_with_flags
    from ckpttool.cli._output import print_json, progress_bar
    from ckpttool.cli._reports import print_verify_report

    with progress_bar("verify") as progress:
        report = ckpttool.verify(src, progress=progress, **options.chosen(given))
    findings = (replace(f, hint=hint_with_flags(f.hint, f.options)) for f in report.findings)
    report = replace(report, findings=tuple(findings))
    if as_json:
        print_json(report)
    else:
        print_verify_report(report)
    if report.findings:
        raise click.exceptions.Exit(1)


@click.command(short_help="Compare two checkpoints, of any formats and topologies.")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--tag-a", metavar="TAG", help="Which checkpoint of A.  [default: the one latest names]")
@click.option("--tag-b", metavar="TAG", help="Which checkpoint of B.  [default: the one latest names]")
@click.option("--rtol", type=click.FloatRange(min=0), help="Relative tolerance.  [default: 0]")
@click.option("--atol", type=click.FloatRange(min=0), help="Absolute tolerance.  [default: 0]")
@options.include_option
@options.exclude_option
@click.option(
    "--all", is_flag=True, help="Also compare steps, learning rates, the scheduler, the loss scale and client state."
)
@options.html_options
@options.jobs_option
@options.json_option
@options.trust_option
@options.common_options
def diff(a: str, b: str, as_json: bool, **given: Any) -> None:
    """Compare the weights and optimizer states of A and B by name, for any formats and topologies.

    Weights are the fp32 master weights, if present. Prints the differences and exits with 1, or with 0 if A and B are
    equal.
    """
    import ckpttool
    from ckpttool.cli._output import print_json, progress_bar
    from ckpttool.cli._reports import print_diff_report, write_page

    page = options.page_of(given, as_json)
    options.check_page(page, given)
    with progress_bar("diff") as progress:
        report = ckpttool.diff(a, b, progress=progress, **options.chosen(given))
    if page["html"] is not None:
        from ckpttool.pages.diff import diff_page

        write_page(page, diff_page(report), given)
    elif as_json:
        names = ("a", "b", "equal", "tensors", "notes", "others")
        print_json({name: getattr(report, name) for name in names})
    else:
        print_diff_report(report)
    if not report.equal:
        raise click.exceptions.Exit(1)


@click.command(short_help="Minimum, maximum, mean, norm and odd values of every tensor.")
@options.sources_argument
@options.tag_option
@options.include_option
@options.exclude_option
@click.option("--optimizer", is_flag=True, help="Also the optimizer's states.")
@options.html_options
@click.option("--each", is_flag=True, help="Each SRC is a checkpoint of its own: show the series over their steps.")
@options.jobs_option
@options.json_option
@options.trust_option
@options.common_options
def stats(src: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Minimum, maximum, mean, norm and counts of NaN, infinity and zero of every tensor of SRC.

    Weights are the fp32 master weights, if present. Reads every value once, in small parts.
    """
    import ckpttool
    from ckpttool.cli._output import print_json, progress_bar
    from ckpttool.cli._reports import print_stats

    page = options.page_of(given, as_json, "each")
    options.check_page(page, given)
    if page["html"] is not None:
        _write_statistics_page(src, page, given)
        return
    with progress_bar("stats") as progress:
        found = ckpttool.stats(src, progress=progress, **options.chosen(given))
    if as_json:
        print_json(found)
    else:
        print_stats(found)


def _write_statistics_page(src: tuple[str, ...], page: dict[str, Any], given: dict[str, Any]) -> None:
    import ckpttool
    from ckpttool.cli._output import progress_bar
    from ckpttool.cli._reports import write_page
    from ckpttool.pages.stats import stats_page

    chosen = options.chosen(given)
    opening = {name: chosen[name] for name in ("tag", "trust_names", "storage_options") if name in chosen}
    series = []
    for one in [(path,) for path in src] if page["each"] else [src]:
        checkpoint = ckpttool.inspect(one, **opening)
        with progress_bar(f"stats {checkpoint.tag}") as progress:
            series.append((checkpoint, ckpttool.stats(one, progress=progress, **chosen)))
    write_page(page, stats_page(series), given)


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
@options.common_options
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
