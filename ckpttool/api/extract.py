"""``extract``: one tensor, or a slice of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.api.options import Options
from ckpttool.arguments import check_choice, checked_path
from ckpttool.plan.builder import source_files

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from ckpttool.execution.read_checks import Check, ReadReport
    from ckpttool.formats import Source
    from ckpttool.model import Checkpoint


@dataclass(frozen=True, slots=True)
class ExtractReport:
    """Result of ``extract_to_file``."""

    out: str
    """The file."""
    name: str
    """The tensor."""
    state: str
    """Which of its states."""
    dtype: str
    """Its type, as safetensors spells it."""
    shape: tuple[int, ...]
    """Shape of the tensor in the file."""
    nbytes: int
    """Bytes of its values."""
    checks: ReadReport | None = None
    """Comparisons with recorded checksums; None for ``check="off"``."""


def extract(  # noqa: PLR0913  public API
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
        src: As for ``inspect``, or the ``Checkpoint`` that ``inspect`` returned.
        name: Parameter or buffer, by its own or a tied name.
        tag: As for ``inspect``.
        state: "weights" for the fp32 master weights, or where there are none the model's own copy; or the name of a
            state in the checkpoint: "fp32", "module", "exp_avg", ...
        part: Index as in ``tensor[part]``: integers and slices of step 1, one for each dimension from the first on;
            default: the whole tensor.
        check: As for ``consolidate``.
        framework: "numpy" for an array (bf16 as ``ml_dtypes`` has it), "torch" for a tensor.
        trust_names: As for ``inspect``.
        storage_options: As for ``inspect``.

    Returns:
        The tensor in its type and shape; it owns its memory.

    Raises:
        ArgumentError: An argument is outside its range, or ``part`` does not fit the shape.
        ChecksumError: The bytes read differ from those saved.
        CkptError: The checkpoint is not sound, or holds no such tensor.
    """
    from ckpttool.analysis.extract import read_part
    from ckpttool.model import Checkpoint
    from ckpttool.model.selection import find

    check_choice("framework", framework, ("numpy", "torch"))
    options = Options(tag=tag, check=check, trust_names=trust_names, storage_options=storage_options)
    checkpoint = src if isinstance(src, Checkpoint) else options.open(src)
    checks = options.read_checks(source_files(checkpoint), checkpoint)
    values = read_part(checkpoint, find(checkpoint, name, state), part, checks)
    if framework == "torch":
        from ckpttool.integrations.torch.tensors import as_torch

        return as_torch(values)
    return values


def extract_to_file(  # noqa: PLR0913  public API
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
        storage_options: As for ``inspect``.

    Raises:
        ArgumentError: ``part`` does not fit the shape.
        ChecksumError: The bytes read differ from those saved.
        CkptError: The checkpoint is not sound, holds no such tensor, or the file cannot be written.
    """
    from ckpttool.analysis.extract import encode, read_part
    from ckpttool.execution.output.destination import write_file
    from ckpttool.execution.permissions import mode_of
    from ckpttool.model.selection import find

    options = Options(tag=tag, check=check, trust_names=trust_names, storage_options=storage_options)
    checkpoint = options.open(src)
    found = find(checkpoint, name, state)
    checks = options.read_checks(source_files(checkpoint), checkpoint)
    values = read_part(checkpoint, found, part, checks)
    parts = encode(values, name, checked_path("out", out))
    written = write_file(
        checked_path("out", out), parts, overwrite=overwrite, options=storage_options, mode=mode_of(checkpoint)
    )
    report = None if checks is None else checks.report
    return ExtractReport(written, name, state, found.dtype, values.shape, values.nbytes, report)
