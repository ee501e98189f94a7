"""Saves of torch runs -> Checkpoint: a distributed checkpoint, or two files of a framework, and the state of the run.

RUN_STATE has the state beside the tensors: client state, schedulers, the states of other objects that are the same on
all ranks, and the names of buffers and frozen parameters. The files of the ranks have their own states.
"""

from __future__ import annotations

import posixpath
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.commit.manifest import read_manifest
from ckpttool.errors import LayoutError
from ckpttool.formats.dcp import ACCELERATE_MODEL, METADATA, THIN_METADATA, read_dcp, read_dcp_pair
from ckpttool.formats.fields import RESTORE, Fields
from ckpttool.formats.state_dict import Kinds
from ckpttool.formats.state_files import read_state_files
from ckpttool.formats.thin import embedded_in, names_in, read_state, with_kinds
from ckpttool.formats.zero.files import RUN_STATE
from ckpttool.model import Topology
from ckpttool.storage import LATEST

if TYPE_CHECKING:
    from ckpttool.formats.fields import Report
    from ckpttool.formats.location import Location
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage


OF_EACH_RANK = "a state of each rank"
"""In ``Checkpoint.data_states``, in place of a state that the file of each rank has."""
READERS = ((read_dcp, ""), (read_dcp_pair, ACCELERATE_MODEL))
"""Readers of distributed checkpoints, with the directory of the model's metadata."""
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
"""Files by which ``read_state_files`` knows its own."""


def read_torch_run(storage: Storage, location: Location, report: Report) -> Checkpoint | None:
    """Read the layout of a save of a torch run, without tensor bytes.

    Returns:
        The layout; None if the directory has neither a distributed checkpoint nor the two files of a framework.

    Raises:
        CkptError: The checkpoint is damaged.
    """
    thin = any(storage.exists(posixpath.join(location.directory, part, THIN_METADATA)) for _, part in READERS)
    thin = thin and bool(read_manifest(storage, location.directory).thin)  # else a replacement was killed
    return read_run(storage, location, report, THIN_METADATA if thin else METADATA)


def read_run(storage: Storage, location: Location, report: Report, metadata: str) -> Checkpoint | None:
    """Read a save of a torch run, as ``read_torch_run``, by the metadata in the file of a name.

    With THIN_METADATA it is the thin checkpoint, also before its commit.
    """
    directory = location.directory
    read = next((one for one, part in READERS if storage.exists(posixpath.join(directory, part, metadata))), None)
    if read is None and not any(storage.exists(posixpath.join(directory, name)) for name in OPTIMIZERS):
        return None
    torch, file = read_state(storage, directory, RUN_STATE)
    fields = Fields(posixpath.join(directory, RUN_STATE), "", torch.root)
    recorded = fields.optional("groups", list)
    groups = None if recorded is None else [[*map(str, one)] for one in recorded if isinstance(one, list)]
    names = {str(name): str(stored) for name, stored in (fields.optional("names", dict) or {}).items()}
    kinds = Kinds(frozenset(names_in(fields, "buffers")), frozenset(names_in(fields, "frozen")), groups, names)
    found = (
        read_state_files(storage, location, report, kinds)
        if read is None
        else read(storage, location, report, kinds, metadata)
    )
    if found is None:
        raise LayoutError(directory, "has no weights beside its optimizer", RESTORE)
    if metadata == THIN_METADATA:
        found = replace(with_kinds(found, names_in(fields, "buffers"), kinds.frozen), format="thin", thin=True)
    return replace(
        found,
        latest=LATEST,
        root=location.root,
        topology=Topology(data_parallel=max(1, fields.get("world_size", int))),
        step=fields.optional("global_steps", int),
        client_state=fields.get("client_state", dict),
        scheduler=torch.root.get("lr_scheduler"),
        data_states=(fields.optional("extra", dict) or {})
        | dict.fromkeys(map(str, fields.optional("extra_of_ranks", list) or []), OF_EACH_RANK),
        embedded=embedded_in(torch, len(found.files)),
        files=(*found.files, file),
    )
