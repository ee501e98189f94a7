"""Functions that read checkpoints: ``inspect``, ``verify``, ``diff``, ``digest`` and ``extract``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.api.options import Options
from ckpttool.arguments import check_choice, check_positive, checked_path
from ckpttool.blocks import Line, Shown
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.formats import Opening, Source, open_checkpoint, source_paths
from ckpttool.model import Checkpoint
from ckpttool.registry import EXTENSIONS, imported, with_options
from ckpttool.units import Meter, format_size

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from ckpttool.analysis.diff import DiffReport
    from ckpttool.analysis.digest import Digest
    from ckpttool.analysis.verify import VerifyReport
    from ckpttool.blocks import Block
    from ckpttool.execution.checks import Check, ReadReport
    from ckpttool.units import Progress


@with_options
def inspect(
    src: Source,
    *,
    tag: str | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Checkpoint:
    """Read the layout of a checkpoint; no weights are read and no code in it is run.

    Raises:
        CkptError: The checkpoint is missing or damaged; names the file, the problem and the next step.
    """
    opening = Opening(storage_options, follow_links)
    return open_checkpoint(src, tag=tag, opening=opening, trust_names=trust_names)


def _notebook(checkpoint: Checkpoint) -> str | None:
    """Return a checkpoint as HTML for a cell of a notebook: as an extension draws it, or else its tables."""
    drawn = [extension.notebook for extension in EXTENSIONS if extension.notebook]
    return imported(drawn[0])(checkpoint) if drawn else Shown._repr_html_(checkpoint)


def _described(checkpoint: Checkpoint) -> Iterator[Block]:
    """Return a checkpoint as blocks of text."""
    from ckpttool.analysis import texts  # only those who print need it

    return texts.checkpoint(checkpoint)


Checkpoint._notebook, Checkpoint._described = _notebook, _described


@with_options
def verify(
    src: Source,
    *,
    tag: str | None = None,
    deep: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> VerifyReport:
    """Check that a checkpoint is whole and sound; lists every finding instead of raising.

    A finding is about a checkpoint that exists; a missing one raises an error.

    Args:
        deep: Read every byte: compare checksums, look for NaN and infinity, compare 16-bit copies with the fp32
            master weights.

    Raises:
        StorageError: ``src`` does not exist, or it or a file in it cannot be read, and no other defect was found.
        LayoutError: ``src`` contains no checkpoint, or none of this tag.
    """
    opening = Opening(storage_options, follow_links)
    from ckpttool.analysis.verify import verify_checkpoint

    check_positive("jobs", jobs)
    return verify_checkpoint(
        source_paths(src),
        tag=tag,
        deep=deep,
        jobs=jobs,
        progress=progress,
        opening=opening,
        trust_names=trust_names,
    )


@with_options
def diff(  # noqa: PLR0913  public API
    a: Source,
    b: Source,
    *,
    tag_a: str | None = None,
    tag_b: str | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    all: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> DiffReport:
    """Compare two checkpoints of any formats and topologies: names, shapes, weights and optimizer states.

    Both are read once, in small parts. Weights are the fp32 master weights where a checkpoint has them. Element x of
    ``a`` equals element y of ``b`` if ``|x - y| <= atol + rtol * |y|``, or if both are NaN.

    Args:
        tag_a: Tag of the checkpoint in a.
        tag_b: Tag of the checkpoint in b.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        all: Also compare steps, hyper-parameters (learning rates), the scheduler, the loss scale and client state.

    Raises:
        ArgumentError: A tolerance is negative or not finite.
        CkptError: One of them is not sound, or cannot be read.
    """
    opening = Opening(storage_options, follow_links)
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if not 0 <= tolerance < math.inf:
            raise ArgumentError(name, f"is {tolerance}, not finite and 0 or more", "choose 0 for equality")
    options = Options(jobs=jobs, progress=progress, trust_names=trust_names, opening=opening)
    return _diff((a, tag_a), (b, tag_b), (rtol, atol), (include, exclude), options, others=all)


def _diff(
    a: tuple[Source, str | None],
    b: tuple[Source, str | None],
    tolerances: tuple[float, float],
    globs: tuple[Sequence[str], Sequence[str]],
    options: Options,
    *,
    others: bool,
) -> DiffReport:
    from ckpttool.analysis.diff import compare
    from ckpttool.model.selection import NO_SUCH_NAME, contents, matcher

    first, second = (
        open_checkpoint(src, tag=tag, opening=options.opening, trust_names=options.trust_names) for src, tag in (a, b)
    )
    held = [*contents(first), *contents(second)]
    matches = matcher(*globs)
    if not any(matches(c.name) for c in held):
        raise PlanError(first.location, *NO_SUCH_NAME)
    (rtol, atol), (include, exclude) = tolerances, globs
    meter = Meter(sum(c.state.nbytes for c in held), options.progress)
    return compare(
        first,
        second,
        rtol=rtol,
        atol=atol,
        include=include,
        exclude=exclude,
        others=others,
        jobs=options.jobs,
        advance=meter,
    )


@with_options
def digest(
    src: Source,
    *,
    tag: str | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Digest:
    """Digest the values of a checkpoint; sharding and file format make no difference.

    Raises:
        CkptError: The checkpoint is not sound, or cannot be read.
    """
    opening = Opening(storage_options, follow_links)
    from ckpttool.analysis import digest as digests
    from ckpttool.model.selection import contents

    options = Options(tag=tag, jobs=jobs, progress=progress, trust_names=trust_names, opening=opening)
    checkpoint = options.open(src)
    meter = Meter(sum(c.state.nbytes for c in contents(checkpoint)), options.progress)
    return digests.digest(checkpoint, jobs=options.jobs, advance=meter)


@dataclass(frozen=True, slots=True)
class ExtractReport(Shown):
    """Result of ``extract`` to a file."""

    out: str
    """The file."""
    name: str
    """The tensor."""
    state: str
    """Name of its state, such as ``fp32`` or ``exp_avg``."""
    dtype: str
    """Its type, as safetensors spells it."""
    shape: tuple[int, ...]
    """Shape of the tensor in the file."""
    nbytes: int
    """Bytes of its values."""
    checks: ReadReport | None = None
    """Comparisons with recorded checksums; None for ``check="off"``."""

    def blocks(self) -> Iterator[Block]:
        """Yield the content of the file, and the records and files without a compared checksum."""
        contents = f"{self.state} of {self.name}, {self.dtype}, {self.shape}, {format_size(self.nbytes)}"
        yield Line(f"{self.out}: {contents}")
        if self.checks is not None:
            yield from self.checks.blocks()


@with_options
def extract(  # noqa: PLR0913  public API
    src: Source | Checkpoint,
    name: str,
    out: str | os.PathLike[str] | None = None,
    *,
    tag: str | None = None,
    state: str = "weights",
    index: Any = None,
    framework: Literal["numpy", "torch"] = "numpy",
    check: Check = "read",
    overwrite: bool = False,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Any:
    """Read one tensor, or a slice of it, and return it or write it to a file; only its bytes are read.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage), or the
            ``Checkpoint`` that ``inspect`` returned.
        name: Parameter or buffer, by its own or a tied name.
        out: File to write, of the kind of its suffix: ``.safetensors``, ``.npy`` or ``.pt``; default: none.
        state: "weights" for the fp32 master weights, or else the model's own copy; or the name of a state in the
            checkpoint: "fp32", "module", "exp_avg", ...
        index: As in ``tensor[index]``: integers and slices of step 1, one for each dimension from the first on;
            default: the whole tensor.
        framework: Type of the result: "numpy" for an array (bf16 as ``ml_dtypes`` has it), "torch" for a tensor.
        overwrite: Replace ``out`` if it exists.

    Returns:
        The tensor in its type and shape, which owns its memory; with ``out`` an ``ExtractReport``.

    Raises:
        ArgumentError: An argument is outside its range, or ``index`` does not fit the shape.
        ChecksumError: The bytes read differ from those saved.
        CkptError: The checkpoint is not sound, contains no such tensor, or the file cannot be written.
    """
    from ckpttool.analysis.extract import encode, read_part
    from ckpttool.model import Checkpoint
    from ckpttool.model.selection import find
    from ckpttool.plan.builder import source_files

    check_choice("framework", framework, ("numpy", "torch"))
    opening = Opening(storage_options, follow_links)
    options = Options(tag=tag, check=check, trust_names=trust_names, opening=opening)
    checkpoint = src if isinstance(src, Checkpoint) else options.open(src)
    found = find(checkpoint, name, state)
    checks = options.read_checks(source_files(checkpoint), checkpoint)
    values = read_part(checkpoint, found, index, checks)
    if out is not None:
        from ckpttool.execution.destination import write_file
        from ckpttool.execution.permissions import mode_of

        path = checked_path("out", out)
        parts = encode(values, name, path)
        written = write_file(path, parts, overwrite=overwrite, options=storage_options, mode=mode_of(checkpoint))
        report = None if checks is None else checks.report
        return ExtractReport(written, name, state, found.dtype, values.shape, values.nbytes, report)
    if framework == "torch":
        from ckpttool.integrations.torch.objects import as_torch

        return as_torch(values)
    return values
