"""States in files of raw bytes, for tests that merge states."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.dtypes import itemsize
from ckpttool.execution.sources import Sources
from ckpttool.model import State
from ckpttool.model.extents import EXTENT
from ckpttool.model.places import Table
from ckpttool.plan import SourceFile
from ckpttool.storage import LOCAL_SPEC, LocalReader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray


class Disk:
    """Files that grow while tensors are put in them; the bytes between tensors are junk."""

    def __init__(self, directory: Path, files: int) -> None:
        self.paths = {i: directory / f"{i}.raw" for i in range(files)}
        self._data = {i: bytearray(b"junk" * (i + 1)) for i in range(files)}

    def store(self, values: NDArray[Any], dtype: str, borders: Sequence[int] = ()) -> State:
        """Put a tensor in files, a new piece behind every border of its flattened elements, each in the next file."""
        flat = np.ascontiguousarray(values).reshape(-1)
        assert flat.itemsize == itemsize(dtype)
        edges = [0, *sorted(borders), flat.size]
        rows = []
        for i, (begin, end) in enumerate(itertools.pairwise(edges)):
            file = i % len(self.paths)
            data = self._data[file]
            padding = i % 3
            rows.append((begin, end - begin, file, len(data), padding, 1, 0, 0))
            data += flat[begin:end].tobytes() + b"\xff" * (padding * flat.itemsize + i % 5)
        return State(values.shape, dtype, Table(np.array(rows, dtype=EXTENT)))

    def sources(self) -> Sources:
        """The files, written and to be read."""
        files = []
        for i, path in self.paths.items():
            path.write_bytes(self._data[i])
            with LocalReader(str(path)) as reader:
                files.append(SourceFile(str(path), reader.nbytes, reader.version, LOCAL_SPEC))
        return Sources(files)


def counted(shape: tuple[int, ...]) -> NDArray[Any]:
    """A tensor in which every element is another one."""
    return np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)
