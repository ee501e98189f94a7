"""Measure commands against the plain loop over the same bytes: the least that Python needs for the same work.

    python benchmarks/limit.py [--runs N] [--scale large|small|tiny]
    python benchmarks/limit.py --loop cast --source FILE --out FILE --threads 2     # one loop alone

A loop reads pieces of 512 kB, hashes, casts or reduces each while it is in the cache, and writes the result. It has no
format, no check and no commit. It runs in one thread and in as many as there are cores; threads share each file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE = 1 << 19
"""Bytes of one read."""
WRITE = 1 << 17
"""Bytes of one write: larger ones take the page cache longer to allocate."""
KINDS = ("copy", "cast", "crc", "sha", "reduce", "compare")
"""Work of a loop: write as read; write fp32 as bf16; CRC-32; SHA-256; minimum, maximum, sum and zeros of fp32; read
twice and compare."""


def loop(kind: str, source: Path, out: Path | None, threads: int) -> None:
    """Run a loop over a file, or over all files of a directory."""
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    for path in files:
        size = path.stat().st_size
        into = -1
        if out is not None:
            target = out if source.is_file() else out / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            into = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        share = -(-size // (threads * PIECE)) * PIECE
        parts = [(start, min(start + share, size)) for start in range(0, size, share)] if size else []
        with open(path, "rb") as file, ThreadPoolExecutor(threads) as pool:
            fd = file.fileno()
            list(pool.map(partial(_part, kind, fd, into), parts))
        if into >= 0:
            os.close(into)


def _pieces(fd: int, start: int, end: int) -> Iterator[tuple[int, memoryview]]:
    buffer = bytearray(PIECE)
    while start < end:
        view = memoryview(buffer)[: min(PIECE, end - start)]
        read = os.preadv(fd, [view], start)
        yield start, view[:read]
        start += read


def _write(into: int, data: memoryview, at: int) -> None:
    for start in range(0, len(data), WRITE):
        os.pwrite(into, data[start : start + WRITE], at + start)


def _part(kind: str, fd: int, into: int, part: tuple[int, int]) -> None:
    start, end = part
    if kind == "copy":
        for at, data in _pieces(fd, start, end):
            _write(into, data, at)
    elif kind == "crc":
        from isal import isal_zlib

        crc = 0
        for _, data in _pieces(fd, start, end):
            crc = isal_zlib.crc32(data, crc)
    elif kind == "compare":
        import numpy as np

        twice = _pieces(fd, start, end), _pieces(fd, start, end)
        for (_, one), (_, other) in zip(*twice, strict=True):
            if not np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)):
                raise RuntimeError("the file changed")
    elif kind == "sha":
        import hashlib

        sha = hashlib.sha256()
        for _, data in _pieces(fd, start, end):
            sha.update(data)
    else:
        import ml_dtypes
        import numpy as np

        for at, data in _pieces(fd, start, end):
            values = np.frombuffer(data[: len(data) // 4 * 4], dtype=np.float32)
            if kind == "cast":
                _write(into, values.astype(ml_dtypes.bfloat16).view(np.uint8).data, at // 2)
            else:
                with np.errstate(all="ignore"):
                    _ = values.min(), values.max(), values.sum(dtype=np.float64), np.count_nonzero(values)


def bench(runs: int, scale: str) -> None:
    """Compare each command with its loops."""
    from consolidate import CKPTTOOL, PYTHON, checkpoint, copy
    from measure import DATA, Command, alternate, print_table

    root, out = checkpoint(2, scale), DATA / "out"

    def consolidated(source: Path) -> Path:
        whole = DATA / f"limit-{source.name}"
        if not whole.exists():
            subprocess.run([CKPTTOOL, "consolidate", str(source), str(whole), "--to", "safetensors"], check=True)
        return whole

    whole = consolidated(root)
    weights = whole / "model.safetensors"

    def clean() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()

    def ours(name: str, words: list[str], reads: Path) -> Command:
        return Command(f"ckpttool {name}", [[CKPTTOOL, *words]], clean, reads)

    def plain(kind: str, source: Path, *, writes: bool) -> list[Command]:
        cores = len(os.sched_getaffinity(0))
        made = []
        for threads in dict.fromkeys((1, cores)):
            words = [PYTHON, str(Path(__file__).resolve()), "--loop", kind, "--source", str(source)]
            words += [*(["--out", str(out / "loop")] if writes else []), "--threads", str(threads)]
            name = f"plain loop, {threads} thread{'s' * (threads > 1)}"
            made.append(Command(name, [words], clean, source if source.is_dir() else source.parent))
        return made

    made, tag = str(out / "made"), root / (root / "latest").read_text()
    consolidate = ["consolidate", str(root), made, "--to", "safetensors", "--dtype"]
    rows = [
        ("consolidate fp32", ours("consolidate", [*consolidate, "fp32"], root), plain("copy", weights, writes=True)),
        ("consolidate bf16", ours("consolidate", [*consolidate, "bf16"], root), plain("cast", weights, writes=True)),
        ("verify --deep", ours("verify", ["verify", str(root), "--deep"], root), plain("crc", tag, writes=False)),
        ("stats", ours("stats", ["stats", str(root)], root), plain("reduce", weights, writes=False)),
        ("diff", ours("diff", ["diff", str(root), str(whole)], root), plain("compare", weights, writes=False)),
        ("digest", ours("digest", ["digest", str(root)], root), plain("sha", tag, writes=False)),
    ]
    for title, command, loops in rows:
        print_table(title, alternate([command, *loops], runs), loops[0].name, title)
    if scale == "large":
        huge = checkpoint(2, "huge", ranks=2)
        whole = consolidated(huge)
        command = ours("consolidate", ["consolidate", str(huge), made, "--to", "safetensors"], huge)
        others = [copy(whole, out, "cp"), *plain("copy", whole / "model.safetensors", writes=True)]
        print_table("consolidate fp32, 4 GB", alternate([command, *others], runs), "cp", "consolidate fp32, 4 GB")
    shutil.rmtree(out, ignore_errors=True)


def main() -> None:
    """Run the benchmark, or one loop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scale", choices=("large", "small", "tiny"), default="large")
    parser.add_argument("--loop", choices=KINDS)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.loop is None:
        bench(options.runs, options.scale)
    elif options.source is None:
        sys.exit("--loop needs --source")
    else:
        loop(options.loop, options.source, options.out, options.threads)


if __name__ == "__main__":
    main()
