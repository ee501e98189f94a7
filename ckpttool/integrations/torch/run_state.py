"""Read the state of a run beside the tensors of its model and optimizer: client state and scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.commit import has_manifest
from ckpttool.commit.manifest import commit_directory
from ckpttool.execution.checks import checks_for
from ckpttool.execution.sources import Sources
from ckpttool.execution.virtual_file import VirtualFile
from ckpttool.formats.zero.files import RUN_STATE
from ckpttool.integrations.torch.objects import read_file, read_objects, unknown_class, unknown_classes
from ckpttool.plan import CopyPlan
from ckpttool.plan.builder import CopyBuilder
from ckpttool.storage import connect
from ckpttool.targets.torch import TorchFileBuilder, copy_embedded, lacks_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.integrations.live.options import LoadOptions
    from ckpttool.model import Checkpoint


def read_run_state(
    checkpoint: Checkpoint, options: LoadOptions, more: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Return the client state and the scheduler's state, without the files of the ranks.

    Args:
        checkpoint: The checkpoint.
        options: The options of the load.
        more: Further values of the checkpoint to build, by name.

    Raises:
        CkptError: They contain objects of a class that ``allow`` does not name, or reading failed.
    """
    client_state = checkpoint.client_state
    scheduler = None if options.weights_only or not options.scheduler else checkpoint.scheduler
    unknown = unknown_classes([client_state, scheduler, more], options.allow)
    if options.weights_only and (unknown or lacks_tensors(checkpoint, client_state)):
        client_state = {}
    elif unknown:
        raise unknown_class(checkpoint.location, unknown[0])
    values = {"client_state": client_state, "scheduler": scheduler, **(more or {})}
    if options.dry_run:
        return values
    names = [file.name for file in checkpoint.files]
    whole = (checkpoint.client_state, checkpoint.scheduler)
    if RUN_STATE in names and not checkpoint.thin and not unknown_classes([*whole], options.allow):
        content = read_file(checkpoint, names.index(RUN_STATE), options)
        values |= {"client_state": content["client_state"]}
        values |= {} if scheduler is None else {"scheduler": content["lr_scheduler"]}
        return {**values, **(_built(checkpoint, more, options) if more else {})}
    return _built(checkpoint, values, options)


def _built(checkpoint: Checkpoint, values: Mapping[str, Any], options: LoadOptions) -> Mapping[str, Any]:
    """Return values of a checkpoint with the objects in them, and the elements of their tensors."""
    builder = CopyBuilder(checkpoint)
    file = TorchFileBuilder("run_state.pt", builder)
    target = file.build({name: copy_embedded(file, checkpoint, value) for name, value in values.items()})
    plan = CopyPlan(builder.sources, builder.casts, (target,))
    checks = checks_for(builder.sources, checkpoint, options.check)
    with Sources(builder.sources, checks) as sources:
        with VirtualFile(plan, target, sources, memory=options.memory_bytes) as stream:
            read: Mapping[str, Any] = read_objects(stream, options.allow)
        sources.finish()
    return read


def load_options(checkpoint: Checkpoint, options: LoadOptions) -> LoadOptions:
    """Return the options with all checksums to be compared, if a manifest covers every byte."""
    storage = connect(checkpoint.storage)
    committed = has_manifest(storage, commit_directory(storage, checkpoint.location)[0])
    return replace(options, check="full") if committed else options
