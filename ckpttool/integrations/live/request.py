"""The arguments of a save, and their checks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool.commit.manifest import REPLACED
from ckpttool.errors import ArgumentError
from ckpttool.messages import brief
from ckpttool.storage import LATEST, LATEST_UNIVERSAL, MANIFEST, MARK
from ckpttool.storage.safe_files import PARTIAL

KnownEngines = dict[str, "weakref.ref[Any]"]
"""The engines of a run by name."""


class FrameworkFiles(NamedTuple):
    """How a framework itself writes the model and the optimizer of a torch run."""

    files: tuple[str, str] | None = None
    """Names of the file of the weights and of the file of the optimizer, which the first rank writes; None for a
    distributed checkpoint."""
    names: Mapping[str, str] | None = None
    """The names of the weights there, by their names in the model; others are left out. None if they are the same."""


DISTRIBUTED = FrameworkFiles()
"""A distributed checkpoint with the names of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """The arguments of a save; ``CheckpointManager.save`` describes the fields without a text."""

    tag: str | None = None
    client_state: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    overwrite: bool = False
    exclude_frozen: bool = False
    """``exclude_frozen_parameters``."""
    save_latest: bool = True
    rank_state: Any = None
    before: tuple[str, int] | None = None
    """Attempt and number of the previous commit; None for the one that ``latest`` in the root names."""
    root_files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the root that this rank writes before the commit, by path relative to the root."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Further files of the checkpoint of a torch run that this rank writes, by path relative to its directory."""
    written: FrameworkFiles = DISTRIBUTED
    """Files and names of the state of a torch run."""

    def asked(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, with the hints of ``HINTS``."""
        return {
            "tag": self.tag,
            "tag_validation": "FAIL",
            "engines": [""],
            "step": None,
            "optimizer": None,
            "scheduler": None,
            "overwrite": self.overwrite,
            "exclude_frozen_parameters": self.exclude_frozen,
            "save_latest": self.save_latest,
            "files": list(self.written.files or ()),
            "rank_state": "missing" if self.rank_state is None else "given",
        }


HINTS = {"rank_state": "pass rank_state on every rank, or on none"}
"""Hints of errors of ranks with different arguments; the others get a general one."""


def check_names(engines: Mapping[Any, Any]) -> None:
    """Check the names of several engines.

    Raises:
        ArgumentError: A name cannot name a directory, an engine has two names, or the mapping is empty.
    """
    for name in engines:
        if not isinstance(name, str) or "/" in name or checked_tag(name) != name:
            problem = f"has the name {brief(name)}, which cannot name a directory"
            raise ArgumentError("engine", problem, "use letters and digits")
    if not engines:
        raise ArgumentError("engine", "is an empty mapping", 'pass engines by name, such as {"policy": engine}')
    if len({id(one) for one in engines.values()}) < len(engines):
        raise ArgumentError("engine", f"has one engine under two of the names {', '.join(engines)}", "pass each once")


def check_known(engines: Mapping[str, Any], known: KnownEngines | None) -> None:
    """Refuse engines beside others of the run: a restore would load the newest state of both into each.

    Args:
        engines: The engines by name.
        known: The engines of the run before; None to allow any.

    Raises:
        ArgumentError: The run has other engines, which are still there.
    """
    others = [one for name, one in (known or {}).items() if one() is not engines.get(name)]
    if others:
        gc.collect()  # an engine that was replaced
    if any(one() is not None for one in others):
        problem = "is another than the engine that this run has saved or restored before"
        hint = 'pass all engines of the run together, in each call: {"policy": a, "critic": b}'
        raise ArgumentError("engine", problem, hint)


def note_known(engines: Mapping[str, Any], known: KnownEngines | None) -> None:
    """Replace the known engines of the run by these."""
    if known is not None:
        known.clear()
        known.update({name: weakref.ref(one) for name, one in engines.items()})


MAX_NAME_BYTES = 200
"""Maximum bytes of a part of a tag: file names have at most 255, and a replacement or removal adds suffixes."""
NOT_TAGS = frozenset({LATEST, LATEST_UNIVERSAL, "zero_to_fp32.py", "zero_to_torch.py", MANIFEST, MARK})
"""Names of files in the root: no tag may have them."""
CHOOSE = "choose another tag"


def checked_tag(given: Any) -> str:
    """Return a tag that can name a directory.

    Raises:
        ArgumentError: It cannot name a directory.
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


def checked_client_state(client_state: Any) -> Mapping[str, Any]:
    """Return a client state.

    Raises:
        ArgumentError: It is not a mapping, or has a name that is not text.
    """
    if not isinstance(client_state, Mapping):
        problem = f"is a {type(client_state).__name__}, not a mapping"
        raise ArgumentError("client_state", problem, 'pass a dict, as client_state={"step": step}')
    for name in client_state:
        if not isinstance(name, str):
            raise ArgumentError("client_state", f"has the name {brief(name)}, which is not text", "use text as names")
    return client_state


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
