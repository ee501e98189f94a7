"""Runs the storage tests with the lowest or the newest client of a kind of bucket, on a server on this machine.

    python tests/versions/buckets.py DIRECTORY [s3] [azure] [gcs] [--newest]

Each kind gets an environment of its own in DIRECTORY. Servers: moto for S3, Azurite (from npm) for Azure, and
gcp-storage-emulator for Google Cloud Storage. Exits with an error if a test fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ["click", "editables", "hatchling", "hypothesis", "isal", "ml_dtypes", "numpy", "psutil", "pytest"]
TOOLS += ["pytest-xdist", "rich", "safetensors"]
# Exact versions of boto3 and its like, because pip would try hundreds of pairs.
LOWEST = {
    "s3": [
        "s3fs==2024.6.0", "fsspec==2024.6.0", "aiobotocore==2.26.0", "boto3==1.41.5", "moto[server]"
    ],
    "azure": ["adlfs==2024.7.0", "fsspec==2024.6.0"],
    "gcs": ["gcsfs==2024.6.0", "fsspec==2024.6.0"],
}  # fmt: skip
"""The lowest clients that pyproject.toml allows."""
NEWEST = {"s3": ["s3fs>=2026", "moto[server]"], "azure": ["adlfs>=2026"], "gcs": ["gcsfs>=2026"]}
URLS = {"azure": "az://ckpttool/tests", "gcs": "gs://ckpttool/tests"}
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account of Azurite, the same for everyone."""
MAKE_CONTAINER = """
import os
from azure.storage.blob import BlobServiceClient
BlobServiceClient.from_connection_string(os.environ["AZURE_STORAGE_CONNECTION_STRING"]).create_container("ckpttool")
"""
EVERYWHERE = "tests/storage/test_everywhere.py"
UNFIT = f"{EVERYWHERE}::test_any_name_will_do[{URLS['gcs']}-a&b;c/x#y]"
"""Left out: gcp-storage-emulator answers that it has no file with a semicolon in its name."""


def environment(directory: Path, packages: list[str]) -> Path:
    """Make an environment with ckpttool and these packages; return its interpreter."""
    venv.create(directory, with_pip=True, clear=True)
    python = directory / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "-r", str(ROOT / "requirements" / "torch.txt")], check=True)
    subprocess.run([*pip, *TOOLS, *packages], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], check=True)
    return python


@contextlib.contextmanager
def server(kind: str, directory: Path) -> Iterator[dict[str, str]]:
    """Start the server of a kind; yield the environment variables of its clients. The tests start that of S3."""
    if kind == "s3":
        yield {}
        return
    port = str(_free_port())
    if kind == "azure":
        subprocess.run(["npm", "install", "--silent", "--prefix", str(directory), "azurite"], check=True)
        program = str(directory / "node_modules" / ".bin" / "azurite-blob")
        options = ["--disableTelemetry", "--inMemoryPersistence", "--skipApiVersionCheck", "--blobPort", port]
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        account = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};"
        variables = {"AZURE_STORAGE_CONNECTION_STRING": account}
    else:
        venv.create(directory / "emulator", with_pip=True)
        pip = [str(directory / "emulator" / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "gcp-storage-emulator"], check=True)
        program = str(directory / "emulator" / "bin" / "gcp-storage-emulator")
        options = ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory", "--default-bucket=ckpttool"]
        variables = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen([program, *options], stdout=log, stderr=log, cwd=directory)
    try:
        _wait_for(int(port))
        yield variables
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def _wait_for(port: int) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise RuntimeError(f"no server listens on port {port}")


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("kinds", nargs="*", metavar="s3|azure|gcs")
    parser.add_argument("--newest", action="store_true")
    arguments = parser.parse_args()
    failed = []
    for kind in arguments.kinds or LOWEST:
        directory = arguments.directory.resolve() / kind
        directory.mkdir(parents=True, exist_ok=True)
        python = environment(directory / "env", (NEWEST if arguments.newest else LOWEST)[kind])
        chosen = ["tests/storage", "-m", "not deepspeed"]  # the environment has none
        if kind in URLS:
            chosen = [EVERYWHERE, "-k", URLS[kind], "--deselect", UNFIT]
        with server(kind, directory) as variables:
            given = {**os.environ, **variables, "CKPTTOOL_TEST_URLS": URLS.get(kind, "")}
            if kind == "azure":
                subprocess.run([str(python), "-c", MAKE_CONTAINER], env=given, check=True)
            command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:logging", *chosen]
            if subprocess.run(command, env=given, cwd=ROOT, check=False).returncode:
                failed.append(kind)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
