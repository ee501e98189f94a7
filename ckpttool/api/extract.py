"""``extract``: one tensor, or a slice of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.errors import PlanError
from ckpttool.execution.read_checks import checks_for
from ckpttool.formats import Source, open_checkpoint
from ckpttool.plan.copy_checks import source_files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.execution.read_checks import Check, ReadReport
    from ckpttool.model import Checkpoint


@dataclass(frozen=True, slots=True)
class ExtractReport:
    """One tensor that was written."""

    out: str
    """The file."""
    name: str
    """The tensor."""
    state: str
    """Which of its states."""
    dtype: str
    """safetensors' spelling."""
    shape: tuple[int, ...]
    """Of what was written."""
    nbytes: int
    """Bytes of its values."""
    checks: ReadReport | None = None
    """What was compared with recorded checksums; None if there was to be no check."""


def extract(
    src: Source | Checkpoint,
    name: str,
    *,
    tag: str | None = None,
    state: str = "weights",
    part: Any = None,
    framework: Literal["numpy", "torch"] = "numpy",
    check: Check = "read",
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Read one tensor, or a slice of it; only its bytes are read.

    Args:
        src: As for ``inspect``, or what ``inspect`` returned.
        name: Parameter or buffer, by its own or a tied name.
        tag: As for ``inspect``.
        state: "weights" for the fp32 master, or where there is none the model's own copy; or what the checkpoint calls
            a state: "fp32", "module", "exp_avg", ...
        part: What to take of it, as in ``tensor[part]``: integers and slices of step 1, one for each dimension from the
            first on; default: all.
        check: As for ``consolidate``.
        framework: "numpy" for an array (bf16 as ``ml_dtypes`` has it), "torch" for a tensor.
        trust_names: As for ``inspect``.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Returns:
        The tensor in its own type and shape, in memory of its own.

    Raises:
        ChecksumError: What was read is not what was saved.
        CkptError: The checkpoint is not sound, or holds no such tensor.
        ValueError: ``part`` does not fit the shape.
    """
    from ckpttool.analysis.extract import read_part
    from ckpttool.model import Checkpoint
    from ckpttool.model.selection import find

    checkpoint = (
        src
        if isinstance(src, Checkpoint)
        else open_checkpoint(src, tag=tag, options=storage_options, trust_names=trust_names)
    )
    checks = checks_for(source_files(checkpoint), checkpoint, check)
    values = read_part(checkpoint, find(checkpoint, name, state), part, checks)
    if framework == "torch":
        from ckpttool.integrations.torch.tensors import as_torch

        return as_torch(values)
    return values


def extract_to_file(
    src: Source,
    name: str,
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    state: str = "weights",
    part: Any = None,
    check: Check = "read",
    overwrite: bool = False,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ExtractReport:
    """Write one tensor, or a slice of it, to a file; only its bytes are read, and it is held in memory once.

    Args:
        src: As for ``inspect``.
        name: As for ``extract``.
        out: File to write; its ending tells the kind: ``.safetensors``, ``.npy`` or ``.pt``.
        tag: As for ``inspect``.
        state: As for ``extract``.
        part: As for ``extract``.
        check: As for ``consolidate``.
        overwrite: Replace the file if it is there.
        trust_names: As for ``inspect``.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        ChecksumError: What was read is not what was saved.
        CkptError: The checkpoint is not sound, holds no such tensor, or the file cannot be written.
    """
    from ckpttool.analysis.extract import encode, read_part
    from ckpttool.execution.output.destination import write_file
    from ckpttool.execution.permissions import mode_of
    from ckpttool.model.selection import find

    checkpoint = open_checkpoint(src, tag=tag, options=storage_options, trust_names=trust_names)
    found = find(checkpoint, name, state)
    checks = checks_for(source_files(checkpoint), checkpoint, check)
    try:
        values = read_part(checkpoint, found, part, checks)
    except ValueError as error:
        raise PlanError(
            checkpoint.location, f"{name}: {error}", "see ckpttool inspect --params for the shape"
        ) from error
    parts = encode(values, name, os.fspath(out))
    written = write_file(os.fspath(out), parts, overwrite=overwrite, options=storage_options, mode=mode_of(checkpoint))
    report = None if checks is None else checks.report
    return ExtractReport(written, name, state, found.dtype, values.shape, values.nbytes, report)
