"""Weights in a file of ``numpy.savez``: a ZIP archive of one ``.npy`` file for each array, not compressed.

Source: numpy 2.3, lib/_npyio_impl.py (``_savez``) and lib/format.py.
"""

from __future__ import annotations

import math
import posixpath
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.containers import torch_zip
from ckpttool.errors import LayoutError
from ckpttool.formats.weights import checkpoint_of_weights
from ckpttool.model import CheckpointFile, State
from ckpttool.model.places import Contiguous
from ckpttool.storage import parent

if TYPE_CHECKING:
    from typing import Any

    from ckpttool.formats.location import Location
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Reader, Storage

TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "uint8": "U8"}
"""Types of elements in numpy's and in safetensors' spelling."""
MAX_HEADER_BYTES = 1 << 16
"""Longest header of an array."""


def read_npz(storage: Storage, location: Location, _report: Any) -> Checkpoint | None:
    """Read the layout of a file, without the bytes of its arrays; None for anything else than such a file."""
    path = location.directory
    if not path.endswith(".npz") or storage.is_dir(path):
        return None
    with storage.open(path) as reader:
        records = torch_zip.parse(reader)
        states = {record.name.removesuffix(".npy"): _state(reader, record) for record in records}
        name, nbytes = posixpath.basename(path), reader.nbytes
        file = CheckpointFile(name, nbytes, "weights", None, reader.version, container="npz", records=records)
    directory = parent(path)
    where = location._replace(root=directory, directory=directory)
    return checkpoint_of_weights(storage, where, "npz", (file,), states, {})


def _state(reader: Reader, record: Any) -> State:
    """Locate an array: its bytes follow the header of its ``.npy`` file."""
    start, end = record.where.start, record.where.end
    header = BytesIO(reader.read(start, min(end, start + MAX_HEADER_BYTES)))
    try:
        version = np.lib.format.read_magic(header)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, in_columns, dtype = read(header)
    except ValueError as error:
        raise LayoutError(
            reader.path, f"holds {record.name}, which is not an array: {error}", "save it again"
        ) from error
    if dtype.name not in TYPES or dtype.byteorder == ">" or (in_columns and len(shape) > 1):
        problem = f"holds {record.name} as {dtype}, by columns: {in_columns}"
        raise LayoutError(reader.path, problem, "save it by rows, in a type of safetensors")
    return State(shape, TYPES[dtype.name], Contiguous(math.prod(shape), 0, start + header.tell()))
