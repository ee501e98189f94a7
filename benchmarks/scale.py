"""Measure how long the largest layout takes to open, show and plan: 1T parameters over 1024 ranks, with holes as
payload.

    python benchmarks/scale.py [--ranks N ...] [--layers N] [--hidden N] [--runs N]

The files are real containers with the real structure, written by ckpttool itself, with holes in place of tensors.
Reading the structure and planning do not read tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import resource
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import measure

import ckpttool
from ckpttool.containers import torch_zip
from ckpttool.containers.pickler import pickle
from ckpttool.containers.values import Opaque, OrderedDict, Size, StorageRef, TensorRef

if TYPE_CHECKING:
    from pathlib import Path

DATA = measure.DATA / "scale"


def tensor(key: int, numel: int, kind: str, dtype: str, sizes: dict[str, int], width: int) -> TensorRef:
    """A 1-D tensor with a storage of its own."""
    sizes[str(key)] = numel * width
    return TensorRef(StorageRef(str(key), kind, dtype, "cuda:0", numel), dtype, 0, (numel,), (1,))


def write(path: Path, root: Any, sizes: dict[str, int]) -> None:
    """Write a container with holes for payload."""
    built = torch_zip.build(pickle(root, path=str(path)), sizes, prefix=path.stem, path=str(path))
    with path.open("wb") as file:
        file.truncate(built.nbytes)
        for offset, data in built.literals:
            file.seek(offset)
            file.write(data)


def shapes_of(layers: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Parameters of a large decoder: ten for each layer."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (128_000, hidden)}
    for i in range(layers):
        p = f"model.layers.{i}."
        shapes |= {p + f"attn.{n}.weight": (hidden, hidden) for n in "qkvo"}
        shapes |= {p + f"mlp.{n}.weight": (4 * hidden, hidden) for n in ("up", "gate", "down")}
        shapes |= {p + f"norm_{n}.weight": (hidden,) for n in ("in", "post")}
        shapes[p + "mlp.bias"] = (hidden + 3,)
    return shapes


def make(ranks: int, layers: int, hidden: int) -> int:
    """Write the checkpoint; returns its number of parameters."""
    shutil.rmtree(DATA, ignore_errors=True)
    tag = DATA / "global_step1"
    tag.mkdir(parents=True)
    (DATA / "latest").write_text("global_step1")
    shapes = shapes_of(layers, hidden)
    numels = {n: math.prod(s) for n, s in shapes.items()}
    partition = sum(-(-n // ranks) for n in numels.values())
    for rank in range(ranks):
        sizes: dict[str, int] = {}
        flat = {k: tensor(i, partition, "FloatStorage", "F32", sizes, 4) for i, k in enumerate(("fp32", "m", "v"))}
        scaler = Opaque("deepspeed.runtime.fp16.loss_scaler", "LossScaler", "new")
        states = {
            "zero_stage": 3,
            "loss_scaler": scaler,
            "partition_count": ranks,
            "optimizer_state_dict": {
                "state": {0: {"step": 1, "exp_avg": flat["m"], "exp_avg_sq": flat["v"]}},
                "param_groups": [{"lr": 1e-4, "params": [0]}],
            },
            "fp32_flat_groups": [flat["fp32"]],
        }
        root = {"optimizer_state_dict": states, "ds_version": "0.19.8"}
        write(tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", root, sizes)
        sizes = {}
        module = OrderedDict((n, tensor(i, 0, "BFloat16Storage", "BF16", sizes, 2)) for i, n in enumerate(shapes))
        model = {
            "module": module,
            "param_shapes": [OrderedDict((n, Size(s)) for n, s in shapes.items())],
            "global_steps": 1,
            "dp_world_size": ranks,
            "ds_version": "0.19.8",
        }
        write(tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", model, sizes)
    return sum(numels.values())


def main() -> None:
    """Make, open, show, plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=25_000)
    parser.add_argument("--runs", type=int, default=1)
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        bench(ranks, arguments.layers, arguments.hidden, arguments.runs)


def bench(ranks: int, layers: int, hidden: int, runs: int) -> None:
    """Measure a layout over a number of ranks."""
    began = time.perf_counter()
    parameters = make(ranks, layers, hidden)
    print(f"{parameters:,} parameters over {ranks} ranks, written in {time.perf_counter() - began:.1f} s")
    contestants: dict[str, dict[str, list[float]]] = {}
    for _ in range(runs):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # its peak memory is its own
            taken = pool.submit(once).result()
        for name, (seconds, peak) in taken.items():
            quantities = contestants.setdefault(name, {"wall": [], "peak_mb": []})
            quantities["wall"].append(seconds)
            quantities["peak_mb"].append(peak)
    measure.keep(f"{parameters / 1e9:,.0f}G parameters, {ranks} ranks", "open", contestants)
    shutil.rmtree(DATA)


def once() -> dict[str, tuple[float, float]]:
    """Open, show and plan; the seconds of each, and the peak memory of the process after it in MB."""
    began = time.perf_counter()
    checkpoint = ckpttool.inspect(str(DATA))
    taken = {"open": (time.perf_counter() - began, peak_mb())}
    print(f"open: {taken['open'][0]:.1f} s, {len(checkpoint.files)} files, {checkpoint.nbytes:,} bytes")
    if find_spec("ckpttool.extensions.pages") is not None:
        from ckpttool.extensions.pages.checkpoint import checkpoint_page

        began = time.perf_counter()
        page = checkpoint_page(checkpoint)
        taken["page of inspect --html"] = (time.perf_counter() - began, peak_mb())
        before = taken["open"][1]
        print(f"page: {time.perf_counter() - began:.1f} s, {len(page):,} bytes, memory {before:.0f} MB before it")
        print(f"memory with it: {peak_mb():.0f} MB")
    began = time.perf_counter()
    with contextlib.suppress(ckpttool.StorageError):  # the plan is made; hardly a disk has room for its output
        ckpttool.consolidate(str(DATA), DATA / "out", to="safetensors", dry_run=True, max_shard_size="50GB")
    taken["open, plan consolidate"] = (time.perf_counter() - began, peak_mb())
    print(f"open and plan: {time.perf_counter() - began:.1f} s")
    print(f"peak memory: {peak_mb():.0f} MB")
    return taken


def peak_mb() -> float:
    """Peak memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


if __name__ == "__main__":
    main()
