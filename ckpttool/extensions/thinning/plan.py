"""Checkpoint -> plans of a thin checkpoint.

Of DeepSpeed's files its weights as safetensors, sidecar files, and the state of the run: the weights are the output of
``consolidate``, and RUN_STATE has the other content of the model-states files; see ``formats.thin``. Of the save of a
torch run a distributed checkpoint of the weights: the save has its own RUN_STATE, and torch's loaders need METADATA.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpttool.dtypes import TRAINING_DTYPES, itemsize
from ckpttool.errors import LayoutError, PlanError
from ckpttool.formats.dcp import THIN_METADATA, entry_names
from ckpttool.formats.zero.files import RUN_STATE
from ckpttool.model import MASTER, UNKNOWN_GROUP
from ckpttool.plan import CopyPlan
from ckpttool.plan.builder import CopyBuilder
from ckpttool.storage import connect
from ckpttool.targets.dcp import LAYOUTS, plan_dcp_weights
from ckpttool.targets.torch import TorchFileBuilder, copy_embedded, without_tensors
from ckpttool.targets.weight_files import WeightChoice, plan_weight_files
from ckpttool.targets.weights import select_weights

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint
    from ckpttool.plan import TargetFile
    from ckpttool.targets.weights import WeightSelection

VERSION = 1
"""Version of the content of RUN_STATE."""
STEM = "thin"
"""Begin of the names of the files with the weights of a torch run."""


@dataclass(frozen=True, slots=True, eq=False)
class ThinPlan:
    """The files of a thin checkpoint."""

    plans: tuple[CopyPlan, ...]
    """Their plans; each has sources of its own."""
    selection: WeightSelection
    """The weights in them."""

    @property
    def files(self) -> tuple[TargetFile, ...]:
        """All files."""
        return tuple(file for plan in self.plans for file in plan.files)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(plan.nbytes_written for plan in self.plans)


def plan_thin(checkpoint: Checkpoint, dtype: str) -> ThinPlan:
    """Plan the files of a thin checkpoint.

    Args:
        checkpoint: The source.
        dtype: Type of the parameters: "bf16" or "fp32". Buffers keep theirs.

    Raises:
        PlanError: The weights cannot be written, or are not the best that the source contains; or a file of the source
            has the name of one to write.
    """
    _check_masters(checkpoint)
    if checkpoint.stage is None:
        return _plan_distributed(checkpoint, dtype)
    weights = plan_weight_files(checkpoint, WeightChoice("safetensors", dtype), checkpoint.location)
    builder = CopyBuilder(checkpoint)
    state = _run_state(checkpoint, builder)
    planned = ThinPlan((weights.plan, CopyPlan(builder.sources, builder.casts, (state,))), weights.selection)
    taken = {file.name for file in checkpoint.files} & {file.name for file in planned.files}
    if taken:
        problem = f"holds a file named {min(taken)}, which the thin checkpoint would have"
        raise PlanError(checkpoint.location, problem, "pin the checkpoint, and prune leaves it whole")
    return planned


def _plan_distributed(checkpoint: Checkpoint, dtype: str) -> ThinPlan:
    """Plan the distributed checkpoint of the weights of a torch run, with the names of its own.

    Raises:
        LayoutError: The names of its entries are of no known layout.
    """
    selection = select_weights(
        checkpoint, source="masters", dtype=TRAINING_DTYPES[dtype], include=(), exclude=(), exclude_frozen=False
    )
    # A parameter without states may be a buffer, which keeps its type.
    kept = set() if checkpoint.tells_buffers else {p.name for p in checkpoint.parameters if p.frozen}
    kept |= {p.name for p in checkpoint.parameters if dtype == "fp32" and checkpoint.weights(p).dtype == "F64"}
    own = (replace(w, dtype=w.state.dtype) if w.name in kept else w for w in selection.weights)
    selection = replace(selection, weights=tuple(own))
    storage, name = connect(checkpoint.storage), selection.weights[0].name
    directories = {layout.directories[0] for layout in LAYOUTS.values()}
    names = {inner: entry_names(storage, posixpath.join(checkpoint.location, inner)) for inner in directories}
    for layout in LAYOUTS.values():
        if ".".join((*layout.model, name)) in names[layout.directories[0]]:
            thin = replace(layout, stem=STEM, metadata=THIN_METADATA)
            plans = [plan_dcp_weights(checkpoint, selection, thin)]
            if RUN_STATE not in {file.name for file in checkpoint.files}:  # torch alone has saved it
                builder = CopyBuilder(checkpoint)
                state = _run_state(checkpoint, builder)
                plans.append(CopyPlan(builder.sources, builder.casts, (state,)))
            return ThinPlan(tuple(plans), selection)
    problem = f"has no entry of {name} under a name that ckpttool writes"
    raise LayoutError(checkpoint.location, problem, "pin it, and prune leaves it whole")


def _check_masters(checkpoint: Checkpoint) -> None:
    """Check that thinning loses no fp32 master weights that the optimizer stores without names.

    Raises:
        PlanError: It would lose some.
    """
    lost = [
        parameter.name
        for parameter in checkpoint.parameters
        if parameter.group == UNKNOWN_GROUP
        and MASTER not in parameter.states
        and itemsize(checkpoint.weights(parameter).dtype) < itemsize("F32")
    ]
    if lost:
        problem = (
            f"may hold fp32 master weights of {len(lost)} parameters, such as {lost[0]}, that its optimizer only "
            f"numbers: a thin checkpoint would have their {checkpoint.dtype} copies only"
        )
        raise PlanError(checkpoint.location, problem, "pin it, and prune leaves it whole")


def _run_state(checkpoint: Checkpoint, builder: CopyBuilder) -> TargetFile:
    file = TorchFileBuilder(RUN_STATE, builder)
    kept = {
        key: copy_embedded(file, checkpoint, without_tensors(value, keep=checkpoint.embedded))
        for key, value in (("client_state", dict(checkpoint.client_state)), ("lr_scheduler", checkpoint.scheduler))
    }
    root = {
        "version": VERSION,
        **kept,
        "ds_config": without_tensors(dict(checkpoint.ds_config)),
        "ds_version": checkpoint.deepspeed_version,
        "global_steps": checkpoint.step,
        "global_samples": checkpoint.samples,
        "skipped_steps": checkpoint.skipped_steps,
        "stage": checkpoint.stage,
        "world_size": checkpoint.topology.world_size,
        "ranks": {name: getattr(checkpoint.topology, name) for name in checkpoint.topology.__slots__},
        "buffers": [buffer.name for buffer in checkpoint.buffers],
        "frozen": [parameter.name for parameter in checkpoint.parameters if parameter.frozen],
    }
    return file.build(root)
