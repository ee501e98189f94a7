"""Engines of DeepSpeed as a live run: one alone, or several by name that are saved as one checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool._version import __version__
from ckpttool.errors import ArgumentError
from ckpttool.formats.zero.module import ENGINE_KEYS
from ckpttool.integrations.deepspeed.engine import (
    engine_batch,
    inspect_engine,
    inspect_for_save,
    micro_batches,
    whole_layers,
)
from ckpttool.integrations.deepspeed.load import restore_engines
from ckpttool.integrations.live.options import check_switches
from ckpttool.integrations.live.request import check_names, checked_client_state, checked_metrics, checked_tag
from ckpttool.integrations.live.run import Captured, Ready
from ckpttool.saving.provenance import current_provenance
from ckpttool.saving.two_phase import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.integrations.deepspeed.capture import EngineFiles
    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.integrations.live.options import LoadOptions
    from ckpttool.integrations.live.report import LoadReport
    from ckpttool.integrations.live.request import Save
    from ckpttool.integrations.live.run import Kept
    from ckpttool.model import Checkpoint
    from ckpttool.saving.coordination import Ranks
    from ckpttool.saving.files import Payload

LOG = logging.getLogger(__name__)


class CapturedEngine(NamedTuple):
    """The captured state of one engine on this rank."""

    live: LiveEngine
    memory: Sequence[tuple[int, Payload]]
    """``EngineFiles.memory``."""


class EngineRun:
    """The engines of this rank.

    Args:
        engine: An engine, or several by name.
        optimizer: True or False: an engine has its own.
        scheduler: As ``optimizer``.
        step: None: an engine counts its own steps.
        extra: None: an engine saves other states in the client state.
    """

    is_folder = False

    def __init__(self, engine: Any, optimizer: Any, scheduler: Any, step: int | None, extra: Any) -> None:
        self._several = isinstance(engine, Mapping)
        self.objects: Mapping[str, Any] = engine if self._several else {"": engine}
        self.several = "several engines" if self._several else ""
        self.kind: dict[str, Any] = {"run": "an engine of DeepSpeed", "extra": []}
        self._optimizer, self._scheduler, self._step, self._extra = optimizer, scheduler, step, extra

    def asked(self, save: Save) -> dict[str, Any]:
        """Return the arguments of a save that must be the same on all ranks."""
        first = next(iter(self.objects.values()), None)
        validation = tag_validation(first)
        return (
            save.asked()
            | self.kind
            | {
                "tag": save.tag if validation == "FAIL" else None,  # else the first rank's counts
                "tag_validation": validation,
                "engines": [*map(str, self.objects)],
                "step": getattr(first, "global_steps", None),
            }
        )

    def ready(self, save: Save, ranks: Ranks, *, provenance: bool) -> Ready:
        """Check the arguments of a save on this rank, and describe the engines."""
        from ckpttool.integrations.live.rank_states import rank_state_file

        self._check_arguments()
        live = {name: _inspected(one) for name, one in self.objects.items()}
        for one in self.objects.values():
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

    def capture(self, ready: Ready, save: Save, ranks: Ranks, kept: Kept, directory: str) -> Captured:
        """Capture the state of the engines, and check in an engine's first save that a restore would accept it."""
        from ckpttool.integrations.deepspeed.capture import capture
        from ckpttool.integrations.live.files import CapturedFiles, merged

        first_saves: list[tuple[LiveEngine, EngineFiles]] = []
        captured, own_files = CapturedFiles(), ready.own_files
        states: dict[str, CapturedEngine] = {}
        try:
            for name, live in ready.live.items():
                _warn_of_gradients(live.engine, ranks, kept)
                with whole_layers(live.engine):
                    part = capture(
                        live.engine,
                        tag=ready.request.tag,
                        client_state=save.client_state,
                        memory=kept.host_memory(name, on_device=live.engine.device.type != "cpu"),
                        exclude_frozen=save.exclude_frozen,
                        scratch_root=kept.scratch_root,
                        own_files=own_files,
                        name=name,
                    )
                captured = merged([captured, part])
                states[name] = CapturedEngine(live, part.memory)
                if live.engine not in kept.checked:
                    first_saves.append((live, part))
                own_files = {}  # the first engine has the states of the ranks
            if first_saves:
                from ckpttool.integrations.deepspeed.restorable import check_restorable

                check_restorable(first_saves, directory, ranks, strict=not save.exclude_frozen)
                kept.checked.update(live.engine for live, _ in first_saves)
        except BaseException:
            captured.release()
            raise
        return Captured(captured, states)

    def check(self, _options: LoadOptions) -> None:
        """Check that a restore can begin."""
        self._check_arguments()
        for one in self.objects.values():
            inspect_engine(one)

    def _check_arguments(self) -> None:
        """Check the engines, and that no argument of a torch run is given.

        Raises:
            ArgumentError: One is wrong.
        """
        check_switches(optimizer=self._optimizer, scheduler=self._scheduler)
        if self._extra is not None:
            raise ArgumentError("extra", "is for torch models", "save the states in client_state")
        if self._step is not None:
            raise ArgumentError("step", f"is {self._step}, but an engine counts its own steps", "leave it out")
        if self._several:
            check_names(self.objects)

    def restore(self, opened: Sequence[Checkpoint], options: LoadOptions, ranks: Ranks) -> list[LoadReport]:
        """Load an open checkpoint into each engine: all are read before the first one changes."""
        return restore_engines([*zip(self.objects.values(), opened, strict=True)], options, ranks)


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


def _warn_of_gradients(engine: Any, ranks: Ranks, kept: Kept) -> None:
    """Warn once of a save between two micro batches: gradients are in no checkpoint."""
    if kept.warned or not micro_batches(engine):
        return
    kept.warned = True
    if ranks.rank == 0:
        LOG.warning(
            "a save between two micro batches leaves out the accumulated gradients, so that a resumed run differs: "
            "save after a step of the optimizer"
        )


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
    if taken := sorted(set(checked_client_state(client_state)) & reserved):
        problem = f"has names that DeepSpeed uses in the same file: {', '.join(taken)}"
        raise ArgumentError("client_state", problem, "use other names")


def versions() -> dict[str, str]:
    """Return the versions of the saving packages, for the manifest."""
    import deepspeed
    import torch

    return {"ckpttool": __version__, "deepspeed": str(deepspeed.__version__), "torch": str(torch.__version__)}
