"""From the arguments of a save, and the engines, to the request of all ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool._version import __version__
from ckpttool.commit.manifest import REPLACED
from ckpttool.errors import ArgumentError
from ckpttool.formats.zero.module import ENGINE_KEYS
from ckpttool.integrations.deepspeed.engine import engine_batch, inspect_for_save, whole_layers
from ckpttool.messages import brief
from ckpttool.saving.provenance import current_provenance
from ckpttool.saving.two_phase import Request
from ckpttool.storage import LATEST, LATEST_UNIVERSAL, MANIFEST, MARK
from ckpttool.storage.safe_files import PARTIAL

if TYPE_CHECKING:
    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.saving.coordination import Ranks

KnownEngines = dict[str, "weakref.ref[Any]"]
"""The engines of a run by name."""


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

    def asked(self, engines: Mapping[str, Any]) -> dict[str, Any]:
        """Return what must be the same on all ranks, with the hints of ``HINTS``."""
        first, *_ = engines.values()
        validation = tag_validation(first)
        return {
            "tag": self.tag if validation == "FAIL" else None,  # else the first rank's counts
            "tag_validation": validation,
            "overwrite": self.overwrite,
            "exclude_frozen_parameters": self.exclude_frozen,
            "save_latest": self.save_latest,
            "engines": [*engines],
            "step": getattr(first, "global_steps", None),
            "rank_state": "missing" if self.rank_state is None else "given",
        }


HINTS = {"rank_state": "pass rank_state on every rank, or on none"}
"""Hints of errors of ranks with different arguments; the others get a general one."""


class Ready(NamedTuple):
    """A save that a rank is ready to begin."""

    request: Request
    live: Mapping[str, LiveEngine]
    """The engines by name."""
    own_files: Mapping[str, Any]
    """Content of the file of the rank state, by its name; empty without one."""


def ready_to_save(
    engines: Mapping[str, Any], save: Save, ranks: Ranks, known: KnownEngines | None, *, provenance: bool
) -> Ready:
    """Check the arguments of a save on this rank, and describe its engines.

    Args:
        engines: The engines by name.
        save: The arguments.
        ranks: The ranks of the run.
        known: The engines of the run before; None to allow any.
        provenance: Whether the manifest records the origin of the run.

    Raises:
        ArgumentError: An argument is wrong.
        PlanError: A restore does not know an engine's optimizer.
    """
    from ckpttool.integrations.deepspeed.rank_states import rank_state_file

    live = {name: _inspected(one) for name, one in engines.items()}
    check_known(engines, known)
    for one in engines.values():
        check_client_state(save.client_state, one)
    first, *_ = live.values()
    facts = {name: _facts(one) for name, one in live.items()}
    request = Request(
        tag=checked_tag(f"global_step{int(first.engine.global_steps)}" if save.tag is None else save.tag),
        **next(iter(facts.values())),
        metrics=checked_metrics(save.metrics),
        versions=versions(),
        overwrite=save.overwrite,
        engines={} if "" in facts else facts,
        provenance=current_provenance(first.engine) if provenance and ranks.rank == 0 else {},
        latest=save.save_latest,
        before=save.before,
        root_files=save.root_files,
    )
    given = save.rank_state is not None
    return Ready(request, live, rank_state_file(first.topology, ranks, save.rank_state) if given else {})


def _inspected(engine: Any) -> LiveEngine:
    with whole_layers(engine):
        return inspect_for_save(engine)


def _facts(live: LiveEngine) -> dict[str, Any]:
    """Return the fields of a manifest that describe one engine."""
    from ckpttool.integrations.deepspeed.states import optimizer_identity  # imports torch

    without_zero = live.stage == 0 and live.model is not None  # whose files do not record the groups
    return {
        "step": int(live.engine.global_steps),
        "stage": int(live.engine.zero_optimization_stage()),
        "groups": [list(names) for names in live.model.groups] if without_zero and live.model is not None else [],
        "optimizer": optimizer_identity(live),
        "batch": engine_batch(live.engine).to_config(),
    }


def engines_by_name(engine: Any) -> dict[str, Any]:
    """Return engines by name; "" is the name of an engine that is alone.

    Raises:
        ArgumentError: A name cannot name a directory, an engine has two names, or the mapping is empty.
    """
    if not isinstance(engine, Mapping):
        return {"": engine}
    for name in engine:
        if not isinstance(name, str) or "/" in name or checked_tag(name) != name:
            problem = f"has the name {brief(name)}, which cannot name a directory"
            raise ArgumentError("engine", problem, "use letters and digits")
    if not engine:
        raise ArgumentError("engine", "is an empty mapping", 'pass engines by name, such as {"policy": engine}')
    if len({id(one) for one in engine.values()}) < len(engine):
        raise ArgumentError("engine", f"has one engine under two of the names {', '.join(engine)}", "pass each once")
    return dict(engine)


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


def tag_validation(engine: Any) -> str:
    """Return the configured check for tags that differ between ranks: "WARN", "IGNORE" or "FAIL"; default: FAIL.

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
