"""Saves of torch runs -> Checkpoint: a distributed checkpoint, or two files of a framework, and the state of the run.

RUN_STATE has the state beside the tensors: client state, schedulers, the states of other objects that are the same on
all ranks, and the names of buffers and frozen parameters. The files of the ranks have their own states.
"""

from __future__ import annotations

import posixpath
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.containers.torch_file import read_torch_file
from ckpttool.errors import LayoutError
from ckpttool.formats.dcp import ACCELERATE_MODEL, METADATA, read_dcp, read_dcp_pair
from ckpttool.formats.fields import RESTORE, Fields
from ckpttool.formats.state_dict import Kinds
from ckpttool.formats.state_files import read_state_files
from ckpttool.formats.thin import embedded_in, names_in
from ckpttool.formats.zero.files import RUN_STATE
from ckpttool.model import CheckpointFile, Topology
from ckpttool.storage import LATEST

if TYPE_CHECKING:
    from ckpttool.formats.fields import Report
    from ckpttool.formats.location import Location
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage


OF_EACH_RANK = "a state of each rank"
"""In ``Checkpoint.data_states``, in place of a state that the file of each rank has."""
READERS = (
    (read_dcp, METADATA),
    (read_dcp_pair, posixpath.join(ACCELERATE_MODEL, METADATA)),
    *((read_state_files, name) for name in ("optimizer.pt", "optimizer.bin")),
)
"""Readers of the model and the optimizer, with a file by which each knows its own."""


def read_torch_run(storage: Storage, location: Location, report: Report) -> Checkpoint | None:
    """Read the layout of a save of a torch run, without tensor bytes.

    Returns:
        The layout; None if the directory has neither a distributed checkpoint nor the two files of a framework.

    Raises:
        CkptError: The checkpoint is damaged.
    """
    read = next((one for one, name in READERS if storage.exists(posixpath.join(location.directory, name))), None)
    if read is None:
        return None
    path = posixpath.join(location.directory, RUN_STATE)
    with storage.open(path, ahead=True) as reader:
        torch = read_torch_file(reader)
        file = CheckpointFile(RUN_STATE, reader.nbytes, "model", None, reader.version, records=torch.records)
    if not isinstance(torch.root, dict):
        raise LayoutError(path, "is not the state of a run", RESTORE)
    fields = Fields(path, "", torch.root)
    recorded = fields.optional("groups", list)
    groups = None if recorded is None else [[*map(str, one)] for one in recorded if isinstance(one, list)]
    names = {str(name): str(stored) for name, stored in (fields.optional("names", dict) or {}).items()}
    kinds = Kinds(frozenset(names_in(fields, "buffers")), frozenset(names_in(fields, "frozen")), groups, names)
    found = read(storage, location, report, kinds)
    if found is None:
        raise LayoutError(location.directory, "has no weights beside its optimizer", RESTORE)
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
