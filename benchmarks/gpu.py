"""Saves and loads of an engine on a GPU, beside DeepSpeed, torch and the bandwidths of the machine.

    python benchmarks/gpu.py --parameters 1.5e9 --out build/gpu.json
    python benchmarks/gpu.py --parameters 7e9 --states bf16     # 56 GB a save instead of 98
    python benchmarks/gpu.py --device cpu --parameters 2e6      # a trial without meaningful figures

One rank. It needs a disk with room for two saves, and root to read from the disk instead of the page cache. Each
figure is written as soon as it is known; nothing is begun after ``--budget`` seconds.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measure import Command, run_once

import ckpttool
from ckpttool import registry

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = {"cuda": 4096, "cpu": 256}
"""Of a layer; 4096 as in a model of 7 thousand million parameters."""
COPIED = {"cuda": 4 << 30, "cpu": 4 << 20}
"""Bytes that the bandwidths are measured with."""
FAST_WRITER = {"type": "fast", "io_buffer_size": 1 << 28, "io_buffer_double": True, "data_parallel": "replica"}


class Run:
    """The engine, and the measured figures."""

    def __init__(self, options: argparse.Namespace, data: Path) -> None:
        self.options = options
        self.data = data
        self.exports = Path(options.exports or data)
        self.began = time.perf_counter()
        self.found: dict[str, Any] = {"card": "", "parameters": 0, "states": options.states, "rows": {}}
        self.numbers = itertools.count()
        self.engine: Any = None
        self.cuda = options.device == "cuda"

    def settle(self) -> None:
        """Wait for the GPU."""
        if self.cuda:
            import torch

            torch.cuda.synchronize()

    def time(self, name: str, function: Callable[[], Any], *, nbytes: int = 0, cold: bool = False) -> float:
        """Time a function once, and note the seconds and the peaks of memory under a name.

        The host's peak is the growth of this process; that of the GPU is beside what the engine takes.
        """
        gc.collect()
        if cold:
            drop_caches()
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        held = self._gpu_memory(reset=True)
        self.settle()
        began = time.perf_counter()
        function()
        self.settle()
        seconds = time.perf_counter() - began
        row = self.found["rows"].setdefault(name, {"seconds": [], "host": [], "gpu": []})
        row["seconds"].append(round(seconds, 4))
        row["host"].append(memory("VmHWM") - before)
        row["gpu"].append(self._gpu_memory() - held)
        if nbytes:
            row["nbytes"] = nbytes
        self.write()
        print(f"{time.perf_counter() - self.began:6.1f} s  {name}: {seconds:.3f} s", flush=True)
        return seconds

    def _gpu_memory(self, *, reset: bool = False) -> int:
        import torch

        if not self.cuda:
            return 0
        if reset:
            torch.cuda.reset_peak_memory_stats()
            return int(torch.cuda.memory_allocated())
        return int(torch.cuda.max_memory_allocated())

    def write(self, **facts: Any) -> None:
        """Add facts, and write all that is known."""
        self.found |= facts
        Path(self.options.out).write_text(json.dumps(self.found, indent=1) + "\n")

    def try_to(self, part: Callable[[Run], None]) -> None:
        """Do a part, if there is time for it; note why it failed."""
        name = part.__name__
        if self.options.only and name not in self.options.only:
            return
        if time.perf_counter() - self.began > self.options.budget:
            self.write(**{name: "not begun: the time was up"})
            return
        try:
            part(self)
        except Exception as error:
            self.write(**{name: f"{type(error).__name__}: {error}"[-600:]})
            print(f"{name}: {error!r}"[:600], flush=True)


def memory(field: str) -> int:
    """Return a figure of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def drop_caches() -> None:
    """Empty the page cache, as far as this user may."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        print("the page cache cannot be emptied: reads are from memory")


def sync_files(directory: Path) -> None:
    """Sync the files of a directory."""
    for file in directory.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def build(run: Run) -> None:
    """Build an engine at stage 2 with Adam's states."""
    import deepspeed
    import torch

    options = run.options
    os.environ |= {
        "CROSS_RANK": "0",  # these two: DeepSpeed's fast engine reads what its launcher sets
        "CROSS_SIZE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29533",
    }
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if run.cuda else "gloo")
    deepspeed.init_distributed("nccl" if run.cuda else "gloo")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    width = WIDTH[options.device]
    layers = max(1, int(options.parameters) // (width * width))
    shape = {"bias": False, "device": options.device, "dtype": torch.bfloat16}
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, **shape) for _ in range(layers)))
    bf16: dict[str, Any] = {"enabled": True}
    if options.states == "bf16":
        bf16 |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": bf16,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 200_000_000},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    }
    if run.cuda:
        from deepspeed.ops.adam import FusedAdam as Adam

        run.write(card=torch.cuda.get_device_name(0))
    else:
        from torch.optim import AdamW as Adam
    optimizer = Adam(model.parameters(), lr=1e-4)
    run.engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    for _ in range(3):
        step(run)
    run.write(
        parameters=layers * width * width, versions={"torch": torch.__version__, "deepspeed": deepspeed.__version__}
    )


def step(run: Run) -> None:
    """Take one step of training."""
    import torch

    width = WIDTH[run.options.device]
    loss = run.engine(torch.ones(4, width, dtype=torch.bfloat16, device=run.engine.device)).float().square().mean()
    run.engine.backward(loss)
    run.engine.step()


def bandwidths(run: Run) -> None:
    """Copy between the GPU and pinned memory, and write to and read from the disk."""
    import torch

    n = COPIED[run.options.device]
    on_device = torch.ones(n, dtype=torch.uint8, device=run.options.device)
    on_host = torch.ones(n, dtype=torch.uint8, pin_memory=run.cuda)
    for _ in range(4):
        run.time("copy from the GPU to pinned memory", lambda: on_host.copy_(on_device, non_blocking=True), nbytes=n)
        run.time("copy from pinned memory to the GPU", lambda: on_device.copy_(on_host, non_blocking=True), nbytes=n)
    file, piece = run.data / "plain", bytes(on_host[: 16 << 20].numpy())

    def write() -> None:
        with file.open("wb", buffering=0) as out:
            for _ in range(max(1, n // len(piece))):
                out.write(piece)
            os.fsync(out.fileno())

    def read() -> None:
        buffer = bytearray(16 << 20)
        with file.open("rb", buffering=0) as source:
            while source.readinto(buffer):
                pass

    run.time("write a file and fsync", write, nbytes=n)
    run.time("read a file from the disk", read, nbytes=n, cold=True)
    run.time("read a file from the page cache", read, nbytes=n)
    file.unlink()


def saves_in_background(run: Run) -> None:
    """Save in the background; measure the wait of the train loop, and steps during a save."""
    reports: list[Any] = []
    manager = ckpttool.CheckpointManager(run.data / "background", async_save=True, on_save=reports.append, keep_last=1)
    quiet = [run.time("step, no save", lambda: step(run)) for _ in range(10)]
    busy: list[float] = []
    for number in range(run.options.runs + 1):
        name = "manager.save in the background: stall"
        run.time(f"{name}, first" if not number else name, lambda: manager.save(run.engine, tag="b"), nbytes=1)
        while manager.saving and number == 1:
            busy.append(timed(run, lambda: step(run)))
        run.time("manager.wait", manager.wait)
        nbytes = reports[-1].nbytes
        for stall in (name, f"{name}, first"):
            if stall in run.found["rows"]:
                run.found["rows"][stall]["nbytes"] = nbytes
        if number < run.options.runs:
            shutil.rmtree(run.data / "background")
    memories = manager._kept.memory.values()
    run.write(
        nbytes=nbytes,
        seconds_until_commit=[round(report.seconds, 3) for report in reports],
        host_memory={
            "kinds": sorted({kind for m in memories for kind in m.kinds}),
            "bytes": sum(m.nbytes for m in memories),
        },
        steps_while_saving={"mean": statistics.mean(busy) if busy else None, "steps": len(busy)},
        step=statistics.median(quiet),
    )
    shutil.rmtree(run.data / "saved", ignore_errors=True)
    (run.data / "background").rename(run.data / "saved")


def timed(run: Run, function: Callable[[], Any]) -> float:
    """Return the seconds of a function."""
    run.settle()
    began = time.perf_counter()
    function()
    run.settle()
    return time.perf_counter() - began


def blocking_saves(run: Run) -> None:
    """Save and wait for the disk, with ckpttool, DeepSpeed and torch."""
    import torch.distributed.checkpoint as dcp

    nbytes = run.found["nbytes"]

    def native() -> None:
        run.engine.save_checkpoint(str(run.data / "native"), tag="n")

    def native_synced() -> None:
        native()
        sync_files(run.data / "native")

    def of_dcp() -> None:
        optimizer = run.engine.optimizer
        states = optimizer.optimizer.state.items()
        state = {
            "module": dict(run.engine.module.named_parameters()),
            "masters": optimizer.single_partition_of_fp32_groups,
        }
        state["states"] = {f"{n}.{key}": v for n, (_, own) in enumerate(states) for key, v in own.items()}
        dcp.save(state, checkpoint_id=str(run.data / "dcp"))

    extensions = registry.EXTENSIONS
    ways: dict[str, tuple[str, Callable[[], None]]] = {
        "manager.save": ("ours", lambda: save_with(run, "ours")),
        "manager.save without digests": ("ours", lambda: save_with(run, "ours")),
        "engine.save_checkpoint and fsync": ("native", native_synced),
        "engine.save_checkpoint, not on the disk": ("native", native),
        "dcp.save": ("dcp", of_dcp),
    }
    for _ in range(run.options.runs):
        for name, (directory, function) in ways.items():
            if time.perf_counter() - run.began > run.options.budget:
                return
            registry.EXTENSIONS = () if name.endswith("without digests") else extensions
            os.sync()
            try:
                run.time(name, function, nbytes=nbytes)
            finally:
                registry.EXTENSIONS = extensions
                shutil.rmtree(run.data / directory, ignore_errors=True)


def save_with(run: Run, directory: str) -> None:
    """Save with a new manager, and wait."""
    ckpttool.CheckpointManager(run.data / directory).save(run.engine, tag=f"t{next(run.numbers)}")


def fast_persist(run: Run) -> None:
    """Save with DeepSpeed's fast engine, and read its files."""
    from deepspeed.ops.op_builder import UtilsBuilder
    from deepspeed.runtime.checkpoint_engine.utils import create_checkpoint_engine
    from deepspeed.runtime.model_checkpointing.config import get_checkpoint_writer_config
    from deepspeed.utils import groups

    UtilsBuilder().load()  # compiles, once
    engine = run.engine
    before = engine.checkpoint_engine
    engine._config.checkpoint_config["writer"] = get_checkpoint_writer_config({"writer": FAST_WRITER})
    given = {"zero_stage": 2, "has_moe_layers": False, "optimize_dp_state": True}
    engine.checkpoint_engine = create_checkpoint_engine(config_params=engine._config, groups=groups, **given)
    try:
        for _ in range(run.options.runs):
            shutil.rmtree(run.data / "fast", ignore_errors=True)
            os.sync()
            save = "engine.save_checkpoint, DeepSpeed's fast engine"
            run.time(save, lambda: engine.save_checkpoint(str(run.data / "fast"), tag="f"), nbytes=run.found["nbytes"])
    finally:
        engine.checkpoint_engine = before
    told = ckpttool.inspect(str(run.data / "fast"))
    findings = [str(finding) for finding in ckpttool.verify(str(run.data / "fast"), deep=True).findings]
    run.write(fast_files={"parameters": sum(p.numel for p in told.parameters), "findings": findings})


def restores(run: Run) -> None:
    """Restore into the engine, from the disk and from the page cache."""
    nbytes, root = run.found["nbytes"], str(run.data / "saved")
    manager = ckpttool.CheckpointManager(root)
    for cold in (True, False):
        where = "from the disk" if cold else "from the page cache"
        for prove in (False, True):
            told = ", proven" if prove else ""
            run.time(
                f"manager.restore{told}, {where}",
                partial(manager.restore, run.engine, prove=prove),
                nbytes=nbytes,
                cold=cold,
            )
        run.time(f"engine.load_checkpoint, {where}", lambda: run.engine.load_checkpoint(root), nbytes=nbytes, cold=cold)


def consolidation(run: Run) -> None:
    """Export the weights with the command, beside cp of the output and zero_to_fp32."""
    run.engine = None
    gc.collect()
    if run.cuda:
        import torch

        torch.cuda.empty_cache()
    source, out = run.data / "saved", run.exports / "weights"
    for cold in (True, False):
        where = "from the disk" if cold else "from the page cache"
        for dtype in ("bf16", "fp32"):
            words = ("consolidate", str(source), str(out), "--to", "safetensors", "--dtype", dtype)
            command(run, f"consolidate, {dtype}, {where}", cold, "-m", "ckpttool", *words)
            if dtype == run.options.exported:
                copied(run, f"cp of the output, {dtype}, {where}", cold)
            shutil.rmtree(out)
    script = run.data / "saved" / "zero_to_fp32.py"
    if script.exists():
        command(
            run,
            "zero_to_fp32.py, from the page cache",
            False,
            str(script),
            str(source),
            str(out),
            "--safe_serialization",
        )
        shutil.rmtree(out, ignore_errors=True)


def copied(run: Run, name: str, cold: bool) -> None:
    """Time cp of an output."""
    target = run.exports / "copied"
    if cold:
        drop_caches()
    usage(run, name, ["cp", "-r", str(run.exports / "weights"), str(target)], run.exports / "weights")
    shutil.rmtree(target)


def command(run: Run, name: str, cold: bool, *words: str) -> None:
    """Time a command of Python."""
    if cold:
        drop_caches()
    usage(run, name, [sys.executable, *words], run.exports / "weights")


def usage(run: Run, name: str, words: list[str], output: Path) -> None:
    """Run a command; note seconds of wall and CPU, and the bytes of the output."""
    used = run_once(Command(name, [words], lambda: None))
    row = run.found["rows"].setdefault(name, {"seconds": [], "cpu": []})
    row["seconds"].append(round(used.wall, 4))
    row["cpu"].append(round(used.cpu, 3))
    row["nbytes"] = sum(f.stat().st_size for f in output.rglob("*") if f.is_file())
    run.write()
    print(f"{time.perf_counter() - run.began:6.1f} s  {name}: {used.wall:.3f} s", flush=True)


PARTS = (bandwidths, saves_in_background, blocking_saves, fast_persist, restores, consolidation)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parameters", type=float, default=1.5e9)
    parser.add_argument("--states", choices=["fp32", "bf16"], default="fp32", help="type of masters and moments")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which nothing is begun")
    parser.add_argument("--only", nargs="+", choices=[part.__name__ for part in PARTS])
    parser.add_argument("--exported", default="fp32", help="the type whose output cp copies")
    parser.add_argument("--directory", help="where saves go (default: the system's place)")
    parser.add_argument("--exports", help="where exported weights go (default: beside the saves)")
    parser.add_argument("--out", default="gpu.json")
    options = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = options.device
    with tempfile.TemporaryDirectory(prefix="ckpttool-", dir=options.directory) as data:
        run = Run(options, Path(data))
        build(run)
        for part in PARTS:
            run.try_to(part)
    sys.stdout.flush()
    os._exit(0)  # without the interpreter's own ending: threads of gloo now and then abort it


if __name__ == "__main__":
    main()
