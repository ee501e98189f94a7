"""A torch model with its optimizers and its scheduler as a live run: plain, DDP, FSDP2, HSDP or tensor-parallel."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ckpttool._version import __version__
from ckpttool.errors import ArgumentError
from ckpttool.integrations.live.options import LoadOptions
from ckpttool.integrations.live.rank_states import rank_state_file
from ckpttool.integrations.live.request import checked_client_state, checked_metrics, checked_tag
from ckpttool.integrations.live.run import Captured, Ready
from ckpttool.integrations.torch.chunks import capture_chunks, check_saved
from ckpttool.integrations.torch.live import has_gradients, unwrapped
from ckpttool.integrations.torch.live_run import torch_run
from ckpttool.integrations.torch.load import load_run
from ckpttool.messages import brief
from ckpttool.model import Topology
from ckpttool.saving.provenance import current_provenance, note_restored
from ckpttool.saving.two_phase import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.integrations.live.report import LoadReport
    from ckpttool.integrations.live.request import Save
    from ckpttool.integrations.live.run import Kept
    from ckpttool.integrations.torch.live_run import LiveRun
    from ckpttool.model import Checkpoint
    from ckpttool.saving.coordination import Ranks

LOG = logging.getLogger(__name__)
WITHOUT = "pass optimizer=..., or optimizer=False to save the weights alone"


class TorchRun:
    """A torch run on this rank.

    Args:
        model: The model, or several by name.
        optimizer: Its optimizer, or a list of several, or several by name; False for the weights alone.
        scheduler: Its learning-rate scheduler, or several by name; True or False without one.
        step: The steps of the run, for a save.
        extra: Other objects with a state, by name.
    """

    several = ""
    is_folder = True
    clears_gradients = False
    """Whether the loop discards the gradients before the next backward pass: no save needs them."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, step: int | None, extra: Any = None) -> None:
        first = next(iter(model.values())) if isinstance(model, Mapping) else model
        self.objects: Mapping[str, Any] = {"": unwrapped(first)}
        self.kind: dict[str, Any] = {
            "run": "a torch model",
            "optimizer": _classes_of(optimizer),
            "scheduler": _classes_of(scheduler),
            "extra": sorted(map(str, extra)) if isinstance(extra, Mapping) else [],
        }
        self._model, self._optimizer, self._scheduler, self._extra = model, optimizer, scheduler, extra
        self._step: Any = step
        self._checked: LiveRun | None = None

    def asked(self, save: Save) -> dict[str, Any]:
        """Return the arguments of a save that must be the same on all ranks."""
        return (
            save.asked()
            | self.kind
            | {"step": operator.index(self._step) if hasattr(self._step, "__index__") else str(self._step)}
        )

    def ready(self, save: Save, ranks: Ranks, *, provenance: bool) -> Ready:
        """Check the arguments of a save on this rank, and describe the run."""
        step = _steps(self._step)
        if self._optimizer is True or self._optimizer is None:
            raise ArgumentError("optimizer", "is missing", WITHOUT)
        checked_client_state(save.client_state)
        run = torch_run(
            self._model,
            self._optimizer,
            self._scheduler,
            LoadOptions(strict=False, optimizer=self._optimizer is not False),
            self._extra,
        )
        check_saved(run, save.written)
        request = Request(
            tag=checked_tag(f"step-{step}" if save.tag is None else save.tag),
            step=step,
            stage=None,
            metrics=checked_metrics(save.metrics),
            versions={"ckpttool": __version__, "torch": str(torch.__version__)},
            overwrite=save.overwrite,
            provenance=current_provenance(self.objects[""]) if provenance and ranks.rank == 0 else {},
            latest=save.save_latest,
            before=save.before,
            root_files=save.root_files,
        )
        given = save.rank_state is not None
        own_files = rank_state_file(Topology(data_parallel=ranks.size), ranks, save.rank_state) if given else {}
        return Ready(request, run, own_files)

    def capture(self, ready: Ready, save: Save, ranks: Ranks, kept: Kept, directory: str) -> Captured:
        """Capture the part of the state that this rank writes, after all ranks have shared the replicas."""
        run: LiveRun = ready.live
        if run.optimizers and not (kept.warned or self.clears_gradients) and has_gradients(run.named.module):
            kept.warned = True
            if ranks.rank == 0:
                LOG.warning(
                    "the gradients that the run has are not saved: save after zero_grad(), or a resumed run differs if "
                    "the next backward pass adds to them"
                )
        return capture_chunks(run, ready, save, ranks, kept, directory)

    def check(self, options: LoadOptions) -> None:
        """Check that a load can begin."""
        self._checked = torch_run(self._model, self._optimizer, self._scheduler, options, self._extra)

    def restore(self, opened: Sequence[Checkpoint], options: LoadOptions, ranks: Ranks) -> list[LoadReport]:
        """Load an open checkpoint."""
        (checkpoint,) = opened
        run = self._checked or torch_run(self._model, self._optimizer, self._scheduler, options, self._extra)
        report = load_run(run, checkpoint, options, ranks)
        if not options.dry_run:
            note_restored(self.objects[""], checkpoint)
        return [report]


def _steps(given: Any) -> int:
    """Return the steps of a run.

    Raises:
        ArgumentError: They are missing, or not a number.
    """
    try:
        step = -1 if given is None or isinstance(given, bool) else operator.index(given)
    except TypeError:
        step = -1
    if step < 0:
        problem = "is missing" if given is None else f"is {brief(given)}, not a number of steps"
        raise ArgumentError("step", problem, "pass step=..., the steps of the run so far")
    return step


def _classes_of(given: Any) -> list[str]:
    """Return the classes of optimizers or schedulers, which are the same on all ranks."""
    several = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else [given]
    return [type(one).__name__ for one in several]
