"""Simulate a save of a torch run on many ranks, and open it: the exchange of the ranks, the metadata, and the layout.

    python benchmarks/torch_scale.py [--ranks N ...] [--tensors N] [--runs N]

No rank runs: rank 0 gets the messages of all ranks. Each rank has 16 rows of each tensor, as under FSDP2. The files of
all ranks are one file with real archives of fewer rows. torch plans the same save with ``create_global_plan``, without
the collectives around it.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import pickle
import resource
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import measure

import ckpttool
from ckpttool.formats import dcp
from ckpttool.formats.state_dict import Kinds
from ckpttool.saving.files import ArchiveFile, HostPayload, aligned
from ckpttool.targets.dcp import LAYOUTS

# Functions import torch: it would add to the memory of the processes that open a checkpoint.
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.planner import SavePlan

    from ckpttool.integrations.torch.chunks import DcpIndex, Entry

DATA = measure.DATA / "torch_scale"
ROWS, COLUMNS = 16, 8
PLANNED = 256
"""Most ranks that torch plans: with 1,024 it takes minutes."""


def entries(rank: int, ranks: int, tensors: int) -> list[Entry]:
    """The tensors of a rank, a third of them weights."""
    import torch

    from ckpttool.integrations.torch.chunks import Entry

    names = LAYOUTS["nested"]
    found = []
    for n in range(tensors):
        name, key = f"layers.{n // 3}.weight", ("", "exp_avg", "exp_avg_sq")[n % 3]
        path = names.of_state(name, key) if key else (*names.model, name)
        part = torch.empty((ROWS, COLUMNS), device="meta")
        found.append(Entry("", path, "F32", (ROWS * ranks, COLUMNS), part, (ROWS * rank, 0), n, one_writer=False))
    return found


def timed(taken: dict[str, list[float]], function: Callable[[], Any]) -> Any:
    """Call a function, and add the time and the processor time that it takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    taken.setdefault("wall", []).append(time.perf_counter() - wall)
    taken.setdefault("cpu", []).append(time.process_time() - cpu)
    return result


def _index(rank: int, ranks: int, tensors: int) -> DcpIndex:
    from ckpttool.integrations.live.run import Repeated
    from ckpttool.integrations.torch.chunks import DcpIndex

    return DcpIndex(entries(rank, ranks, tensors), rank, "step-1", LAYOUTS["nested"], Repeated())


def archive() -> bytes:
    """The archive of a part of a tensor."""
    from ckpttool.integrations.torch.chunks import _structure

    file = ArchiveFile("archive", _structure("F32", (ROWS, COLUMNS)), {"0": HostPayload(bytes(4 * ROWS * COLUMNS))})
    return b"".join(map(bytes, file.stream()))


def planned(ranks: int, own: Sequence[Entry]) -> list[SavePlan]:
    """The plans of all ranks, which torch gathers on rank 0."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties()
    plans = []
    for rank in range(ranks):
        items = []
        for entry in own:
            offsets = torch.Size([ROWS * rank, 0])
            chunk = ChunkStorageMetadata(offsets, torch.Size([ROWS, COLUMNS]))
            data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(entry.shape))
            index = MetadataIndex(".".join(map(str, entry.path)), offsets, rank)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items, planner_data={}))
    return plans


def saved(ranks: int, tensors: int, runs: int) -> dict[str, dict[str, list[float]]]:
    """Exchange and write the metadata; the quantities of each contestant."""
    import numpy as np
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from ckpttool.integrations.torch.chunks import _packed

    data = archive()
    step = aligned(len(data))
    exchange: dict[str, dict[str, list[float]]] = {"ckpttool, exchange": {}, "ckpttool, metadata and index": {}}
    for _ in range(runs):
        first = entries(0, ranks, tensors)
        indexes = [_index(rank, ranks, tensors) for rank in range(ranks)]
        parts = [index.parts() for index in indexes]
        places = [(n, n * step, len(data)) for n in range(tensors)]
        own = [{"places": _packed(np.array(places, np.int64).tobytes())} for _ in range(ranks)]
        ours = exchange["ckpttool, exchange"]
        decision = timed(ours, partial(indexes[0].share, parts))
        print(
            f"message of a rank: {len(pickle.dumps(parts[1])):,} bytes; answer: {len(pickle.dumps(decision)):,} bytes"
        )
        timed(exchange["ckpttool, metadata and index"], partial(indexes[0].check, own))
        if ranks <= PLANNED:
            plans = planned(ranks, first)
            planner = DefaultSavePlanner()
            planner.flatten_state_dict = False
            theirs = exchange.setdefault("torch, create_global_plan", {})
            timed(theirs, partial(planner.create_global_plan, plans))
            print(f"plan of a rank of torch: {len(pickle.dumps(plans[1])):,} bytes")
    _write({file.name: b"".join(map(bytes, file.stream())) for file in indexes[0].files()}, data, step, ranks, tensors)
    return exchange


def simulate(ranks: int, tensors: int, runs: int) -> None:
    """Measure a save and opening it, in processes of their own: a child begins with the peak of its parent."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        exchange = pool.submit(saved, ranks, tensors, runs).result()
    print(f"\n{ranks} ranks x {tensors} tensors")
    for name, taken in exchange.items():
        print(f"{name:36}" + "".join(f"{quantity} {min(values):9.3f}   " for quantity, values in taken.items()))
    measure.keep(f"{ranks} ranks x {tensors} tensors, save", "ckpttool, exchange", exchange)
    opened(ranks, tensors, runs)


def _write(described: dict[str, bytes], data: bytes, step: int, ranks: int, tensors: int) -> None:
    """Write the checkpoint: the ranks have links to one file."""
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir(parents=True)
    for name, content in described.items():
        (DATA / name).write_bytes(content)
    first = DATA / "__0_0.distcp"
    first.write_bytes((data + bytes(step - len(data))) * tensors)
    for rank in range(1, ranks):
        os.link(first, DATA / f"__{rank}_0.distcp")


def opened(ranks: int, tensors: int, runs: int) -> None:
    """Open the checkpoint by its index, and by its metadata and archives."""
    contestants: dict[str, dict[str, list[float]]] = {}
    for _ in range(runs):
        for name, task in (("index", by_index), ("metadata and archives", inspect), ("pickle.load", unpickle)):
            if task is not by_index and ranks > PLANNED:
                continue
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # its peak memory is its own
                taken = pool.submit(measured, task).result()
            for quantity, value in taken.items():
                contestants.setdefault(name, {}).setdefault(quantity, []).append(value)
    for name, values in contestants.items():
        print(f"open, {name:30}{min(values['cpu']):9.2f} CPU s {max(values['peak_mb']):9.0f} MB")
    measure.keep(f"{ranks} ranks x {tensors} tensors, open", "index", contestants)
    shutil.rmtree(DATA)


def measured(task: Callable[[Path], None]) -> dict[str, float]:
    """Run a task; its time and processor time in seconds, and the memory in MB that it added to the peak."""
    if task is unpickle:
        import torch.distributed.checkpoint.filesystem  # noqa: F401  importing it is not measured
    before = peak_mb()
    taken: dict[str, list[float]] = {}
    timed(taken, partial(task, DATA))
    return {"wall": taken["wall"][0], "cpu": taken["cpu"][0], "peak_mb": peak_mb() - before}


def by_index(directory: Path) -> None:
    """Open a save of a torch run."""
    kinds = Kinds(frozenset(), frozenset(), [[]])
    dcp.has_manifest = lambda *_: True  # type: ignore[attr-defined]
    dcp._read = partial(_with, dcp._read, kinds)
    inspect(directory)


def _with(read: Callable[..., Any], kinds: Kinds, storage: Any, location: Any, parts: Any, _: Any, name: str) -> Any:
    return read(storage, location, parts, kinds, name)


def inspect(directory: Path) -> None:
    """Open it as any distributed checkpoint."""
    checkpoint = ckpttool.inspect(directory)
    if not math.prod(checkpoint.parameters[0].shape):
        raise ValueError("the checkpoint has no elements")


def unpickle(directory: Path) -> None:
    """Read the metadata as torch does."""
    with (directory / ".metadata").open("rb") as file:
        pickle.load(file)


def peak_mb() -> float:
    """Peak memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def main() -> None:
    """Simulate each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tensors", type=int, default=900)
    parser.add_argument("--runs", type=int, default=2)
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        simulate(ranks, arguments.tensors, arguments.runs)


if __name__ == "__main__":
    main()
