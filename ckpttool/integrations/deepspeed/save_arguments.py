"""Checks of the arguments of a save, made before any rank writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool._version import __version__
from ckpttool.commit.manifest import REPLACED
from ckpttool.commit.marks import PARTIAL
from ckpttool.errors import ArgumentError
from ckpttool.messages import brief
from ckpttool.storage import LATEST, LATEST_UNIVERSAL, MANIFEST, MARK

MAX_NAME_BYTES = 200
"""Maximum bytes of a part of a tag: file names have at most 255, and a replacement or removal adds suffixes."""
NOT_TAGS = frozenset({LATEST, LATEST_UNIVERSAL, "zero_to_fp32.py", "zero_to_torch.py", MANIFEST, MARK})
"""Names of files in the root: no tag may have them."""
CHOOSE = "choose another tag"


def checked_tag(given: Any) -> str:
    """Return a tag that can name a directory.

    Raises:
        ArgumentError: It cannot be one.
    """
    tag = str(given)
    if not tag.isprintable() or any(part in {"", ".", ".."} or part.startswith(".") for part in tag.split("/")):
        problem = f"cannot be {brief(tag)}: a tag is printable, and no part of it begins with a dot"
        raise ArgumentError("tag", problem, CHOOSE)
    if any(len(part.encode()) > MAX_NAME_BYTES for part in tag.split("/")):
        problem = f"cannot be {brief(tag, 40)}: no part of a tag may be longer than {MAX_NAME_BYTES} bytes"
        raise ArgumentError("tag", problem, CHOOSE)
    if tag in NOT_TAGS or tag.endswith((REPLACED, PARTIAL, ".removed")):
        raise ArgumentError("tag", f"cannot be {brief(tag)}: the root has a file of that name", CHOOSE)
    return tag


def tag_validation(engine: Any) -> str:
    """Return what the configuration says of tags that differ between ranks: "WARN", "IGNORE" or "FAIL"; default: FAIL.

    DeepSpeed's own default warns: its ranks then write one checkpoint into several directories.

    Source: DeepSpeed 0.19.8, runtime/engine.py (``_checkpoint_tag_validation``).
    """
    config = getattr(getattr(engine, "_config", None), "_param_dict", {}).get("checkpoint")
    return str((config or {}).get("tag_validation", "FAIL")).upper()


def check_client_state(client_state: Any, engine: Any) -> None:
    """Refuse client state whose names a restore would not return.

    Raises:
        ArgumentError: It is not a mapping, or has a name that is not text or is reserved by DeepSpeed.
    """
    from ckpttool.formats.zero.module import ENGINE_KEYS

    reserved = ENGINE_KEYS | {"folding"}
    if not engine.has_moe_layers:
        reserved -= {"universal_checkpoint_info"}  # Megatron-DeepSpeed passes it here, and DeepSpeed reads it here

    if not isinstance(client_state, Mapping):
        problem = f"is a {type(client_state).__name__}, not a mapping"
        raise ArgumentError("client_state", problem, 'pass a dict, as client_state={"step": step}')
    for name in client_state:
        if not isinstance(name, str):
            raise ArgumentError("client_state", f"has the name {brief(name)}, which is not text", "use text as names")
    if taken := sorted(set(client_state) & reserved):
        problem = f"has names that DeepSpeed uses in the same file: {', '.join(taken)}"
        raise ArgumentError("client_state", problem, "use other names")


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as floats.

    Raises:
        ArgumentError: They are not a mapping of names to numbers.
    """
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, OverflowError, AttributeError, RuntimeError) as error:
        problem = f"are not a mapping of names to numbers ({type(error).__name__}: {error})"
        raise ArgumentError("metrics", problem, "pass floats, and leave out missing values") from error


def versions() -> dict[str, str]:
    """Return the versions of the saving packages, for the manifest."""
    import deepspeed
    import torch

    return {"ckpttool": __version__, "deepspeed": str(deepspeed.__version__), "torch": str(torch.__version__)}
