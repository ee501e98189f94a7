"""Check before the first save of an engine that a restore into an engine built alike would succeed.

The structure of all ranks' files, without tensors, is written as sparse files to a scratch directory of the first rank.
It opens them and matches them with its engine as in a restore; the storage of the checkpoint is not used.
"""

from __future__ import annotations

import logging
import os
import posixpath
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ckpttool.errors import CkptError, PlanError
from ckpttool.formats import open_checkpoint
from ckpttool.integrations.deepspeed.engine import data_sampler, has_optimizer, parameters_on_nvme
from ckpttool.integrations.deepspeed.load_plan import prepare
from ckpttool.integrations.deepspeed.prepared import LoadOptions
from ckpttool.integrations.torch.sampler import POSITION
from ckpttool.messages import brief
from ckpttool.saving.files import ArchiveFile
from ckpttool.storage import LOCAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.integrations.deepspeed.capture import CapturedFiles
    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.saving.coordination import Ranks
    from ckpttool.saving.files import OutgoingFile

LOG = logging.getLogger(__name__)
SCALAR_BYTES = 1 << 10
"""Most bytes of a tensor that is copied with the structure: readers read the optimizer's numbers."""
HINT = "change that, or save with engine.save_checkpoint"

Structure = tuple[str, int, list[tuple[int, bytes]]]
"""Name and size of a file, and its bytes beside tensors, by offset."""


def check_restorable(
    live: LiveEngine, directory: str, ranks: Ranks, captured: CapturedFiles, *, name: str, strict: bool
) -> None:
    """Check that captured files can be restored into the engine; call it on every rank.

    Args:
        live: The engine that they are of.
        directory: Directory of the checkpoint, for errors.
        ranks: The ranks of the run.
        name: Name of one of several engines; "" for one alone.
        captured: The files of this rank. If a rank could not capture its own, there is nothing to check.
        strict: Whether all parameters of the model must be there.

    Raises:
        PlanError: They cannot be restored; the same on every rank.
    """
    own = None if captured.failed is not None else [_structure(file) for file in captured.files]
    experts = [group.get("name") for group in live.hyperparameters if group.get("moe")]
    complete: list[Any] = [None] * ranks.size
    dist.all_gather_object(complete, (own is not None, experts))
    if not all(captures for captures, _ in complete):
        return
    everyone: list[Any] = [None] * ranks.size
    dist.gather_object(own, everyone if ranks.rank == 0 else None)
    for lost in (_unsaved_optimizer(live), _compression(live), _sampler(live), _nvme(live)) if ranks.rank == 0 else ():
        if lost:
            LOG.warning("%s: %s", directory, lost)
    # Source: DeepSpeed 0.19.8, moe/utils.py (``split_params_into_different_moe_groups_for_optimizer``: a set of names).
    orders = "its groups of experts have another order than on other ranks: set PYTHONHASHSEED, the same on all ranks"
    problem = _elastic_problem(live) or ("" if all(names == experts for _, names in complete) else orders)

    def check(problems: list[str]) -> None:
        """Check the files of all ranks on the first rank, because they are alike."""
        with tempfile.TemporaryDirectory(prefix=".ckpttool-scratch-") as scratch:
            path = posixpath.join(scratch, posixpath.basename(directory))
            try:
                for found in filter(None, problems):
                    raise PlanError(path, found, "")
                _write_sparse([file for files in everyone for file in files], path)
                checkpoint = open_checkpoint(posixpath.join(path, name) if name else path, storage=LOCAL)
                # Objects in these two are built with ``allow``, which a restore may add.
                checkpoint = replace(checkpoint, client_state={}, scheduler=None)
                prepare(live, checkpoint, LoadOptions(strict=strict, dry_run=True, structure_only=True))
            except CkptError as failed:
                why = f"was not saved: it could not be restored: {failed.problem}".replace(path, directory)
                raise PlanError(directory, why, HINT) from failed

    ranks.exchange(directory, lambda: problem, check)


def _structure(file: OutgoingFile) -> Structure:
    """Return the bytes of a file beside tensors, and small tensors."""
    if not isinstance(file, ArchiveFile):
        return file.name, file.nbytes, []
    literals, payloads = file.layout
    small = [
        (where.start, bytes(file.payloads[key].read(0, where.nbytes)))
        for key, where in payloads.items()
        if where.nbytes <= SCALAR_BYTES
    ]
    return file.name, file.nbytes, [*literals, *small]


def _write_sparse(files: Sequence[Structure], directory: str) -> None:
    for name, nbytes, pieces in files:
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(nbytes)
            for start, data in pieces:
                file.seek(start)
                file.write(data)


def _unsaved_optimizer(live: LiveEngine) -> str:
    """Return which optimizer within the engine's has states that no checkpoint would contain; "" if there is none."""
    inner = live.optimizer.optimizer if live.wrapper and has_optimizer(live.optimizer) else live.optimizer
    if getattr(type(inner), "state_dict", None) is not torch.optim.Optimizer.state_dict:
        return ""  # there is none, or its state dict is its own
    hooks, kept = inner._optimizer_state_dict_post_hooks, {id(state) for state in inner.state.values()}
    for name, held in vars(inner).items() if not hooks else ():
        for one in held if isinstance(held, list | tuple) else [held]:
            if isinstance(one, torch.optim.Optimizer) and any(id(v) not in kept for v in one.state.values() if v):
                return (
                    f"the states of {name} ({type(one).__name__}) are not in the state_dict() of the engine's "
                    f"{type(inner).__name__}: a restore would not restore them"
                )
    return ""


def _compression(live: LiveEngine) -> str:
    """Return which states of an optimizer that compresses communication DeepSpeed does not save; "" for others.

    Source: DeepSpeed 0.19.6, runtime/fp16/onebit/adam.py, lamb.py and zoadam.py, which later releases lack.
    """
    inner = live.optimizer.optimizer if live.wrapper and has_optimizer(live.optimizer) else live.optimizer
    if not hasattr(inner, "comm_backend_handle"):
        return ""
    kind = type(inner).__name__
    lost = f"DeepSpeed saves the compression errors of {kind} on the first rank alone, and its load resets them"
    return f"{lost}, and weights that differ between synchronizations" if kind == "ZeroOneAdam" else lost


def _nvme(live: LiveEngine) -> str:
    """Return that DeepSpeed cannot load into an engine with parameters or optimizer on NVMe; "" for others."""
    if parameters_on_nvme(live):
        return "DeepSpeed cannot load into an engine with parameters on NVMe: a restore needs them on the CPU"
    if live.engine.zero_nvme_offload_optimizer():
        return "DeepSpeed cannot load into an optimizer on NVMe: a restore needs it on the CPU"
    return ""


def _sampler(live: LiveEngine) -> str:
    """Return why a resumed run would read other samples than curriculum learning's; "" if it reads the same.

    Source: DeepSpeed 0.19.8, runtime/data_pipeline/data_sampling/data_sampler.py (``state_dict`` has numpy's global
    generator, not ``np_rng``, which draws the samples).
    """
    sampler = data_sampler(live.engine)
    if sampler is None or hasattr(sampler, POSITION):
        return ""
    return (
        "the state of DeepSpeed's data sampler lacks the generator that draws the samples: a resumed run reads others; "
        "save ckpttool.data.CurriculumPosition in client_state"
    )


def _elastic_problem(live: LiveEngine) -> str:
    """Return why an elastic checkpoint cannot store the states: DeepSpeed keeps a partition's, without padding.

    Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (``_get_base_optimizer_state``,
    ``_get_state_without_padding``).
    """
    if live.stage not in {1, 2} or not live.engine.zero_elastic_checkpoint():
        return ""
    states, owners = live.optimizer.optimizer.state, {id(owner) for owner in live.masters}
    for key in states:
        if id(key) not in owners:
            return f"elastic_checkpoint leaves out state {brief(key)} of the optimizer, which belongs to no parameter"
    for owner in live.masters:
        for name, value in states.get(owner, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() != owner.numel():
                return f"elastic_checkpoint cuts {name} of the optimizer, which has not the length of a partition"
    return ""
