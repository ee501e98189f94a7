"""Measure checkpoints in a bucket against download, ``zero_to_fp32.py`` and upload, side by side in one run.

    python benchmarks/storage.py [--runs N] [--latency SECONDS ...] [--stage 2]

Needs the AWS CLI on the PATH (``pipx install awscli``: it pins another botocore) besides the requirements of the tests.
The bucket is ``benchmarks/s3_server.py`` on the loopback, which uses this machine's cores; ``--latency`` simulates the
distance to S3. The checkpoints are made by ``consolidate.py``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from consolidate import CKPTTOOL, PYTHON, checkpoint
from measure import DATA, SCALES, TRIAL, Command, alternate, print_table, run_once
from s3_server import running

if TYPE_CHECKING:
    from collections.abc import Callable

    from s3_server import Server

REMOVE = """
import sys, s3fs
fs = s3fs.S3FileSystem()
if fs.exists(sys.argv[1]):
    fs.rm(sys.argv[1], recursive=True)
"""
AWS = shutil.which("aws") or str(Path(PYTHON).with_name("aws"))
OUT = DATA / "out"

# Counts requests, and bytes of their answers.
COUNT_REQUESTS = """
import sys
from botocore.httpsession import URLLib3Session
from ckpttool import inspect
requests, received = [], []
send = URLLib3Session.send
def counted(self, request):
    answer = send(self, request)
    requests.append(request.url)
    received.append(int(answer.headers.get("content-length") or 0))
    return answer
URLLib3Session.send = counted
checkpoint = inspect(sys.argv[1])
print(len(requests), sum(received), len(checkpoint.files), checkpoint.nbytes)
"""


def clear() -> None:
    """Remove the output of the previous run."""
    shutil.rmtree(OUT, ignore_errors=True)


def ours(name: str, src: str, out: str, *options: str) -> Command:
    """Our consolidation, to local disk or to another bucket."""
    return Command(name, [[CKPTTOOL, "consolidate", src, out, "--to", "safetensors", *options]], _fresh(out))


def _fresh(out: str) -> Callable[[], None]:
    def prepare() -> None:
        clear()
        if out.startswith("s3://"):
            subprocess.run([PYTHON, "-c", REMOVE, out], check=True)

    return prepare


def peer(name: str, src: str, upload: str | None) -> Command:
    """The usual way: download everything, consolidate, upload."""
    local, weights = OUT / "download", OUT / "weights"
    steps = [
        [AWS, "s3", "cp", "--recursive", "--quiet", src, str(local)],
        [PYTHON, str(DATA / Path(src).name / "zero_to_fp32.py"), str(local), str(weights), "--safe_serialization"],
    ]
    if upload is not None:
        steps.append([AWS, "s3", "cp", "--recursive", "--quiet", str(weights), upload])
    return Command(name, steps, _fresh(upload or str(OUT)))


def bench(server: Server, root: Path, latency: float, runs: int, peer_runs: int) -> None:
    """All comparisons at one distance."""
    os.environ.update(server.environment())
    src = f"s3://data/{root.name}"
    print(f"\n=== {root.name}, {1000 * latency:.0f} ms before each answer ===")
    counted = subprocess.run([PYTHON, "-c", COUNT_REQUESTS, src], capture_output=True, text=True, check=True)
    requests, received, files, total = map(int, counted.stdout.split())
    wall = run_once(Command("inspect", [[CKPTTOOL, "inspect", src]], lambda: None)).wall
    print(
        f"inspect: {wall:.2f} s, {requests} requests and {received:,} bytes for {files} files of {total:,} bytes "
        f"({requests / files:.1f} requests a file)"
    )
    local, bucket = str(OUT / "weights"), "s3://out/weights"
    mine, name = ours("ckpttool", src, local), "ckpttool"
    theirs = peer("aws s3 cp, zero_to_fp32.py", src, None)
    far = f"{1000 * latency:.0f} ms"
    print_table("bucket to local disk", alternate([mine, theirs], peer_runs), name, f"to disk, {far}")
    mine = ours(name, src, bucket)
    theirs = peer("aws s3 cp, zero_to_fp32.py, aws s3 cp", src, bucket)
    print_table("bucket to bucket", alternate([mine, theirs], peer_runs), name, f"to bucket, {far}")
    many, one = ours("16 at once", src, bucket, "--jobs", "16"), ours("one at a time", src, bucket, "--jobs", "1")
    print_table("requests at once, bucket to bucket", alternate([many, one], runs), many.name)
    for memory in ("64MB",) if TRIAL else ("64MB", "256MB", "1GB"):
        used = run_once(ours(name, src, bucket, "--memory", memory))
        print(f"--memory {memory}: peak {used.peak_mb:.0f} MB, {used.wall:.2f} s, {used.cpu:.2f} s of processor time")
    start = run_once(Command("start", [[CKPTTOOL, "inspect", src]], lambda: None))
    print(f"(inspect alone: peak {start.peak_mb:.0f} MB)")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="counted runs of our own (default: 3)")
    parser.add_argument("--peer-runs", type=int, default=3, help="counted runs against the peers (default: 3)")
    parser.add_argument("--stage", type=int, choices=(2, 3), default=2)
    parser.add_argument("--scale", choices=SCALES, default="large")
    parser.add_argument("--latency", type=float, nargs="+", default=(0.0, 0.05), metavar="SECONDS")
    arguments = parser.parse_args()
    if arguments.peer_runs and not Path(AWS).exists():
        sys.exit(f"{AWS} is missing: pipx install awscli")
    DATA.mkdir(exist_ok=True)
    root = checkpoint(arguments.stage, arguments.scale)
    for latency in arguments.latency:
        options = ["--serve", f"data={DATA}", "--bucket", "out", "--latency", str(latency)]
        with running(*options) as server:
            bench(server, root, latency, arguments.runs, arguments.peer_runs)
    clear()


if __name__ == "__main__":
    main()
