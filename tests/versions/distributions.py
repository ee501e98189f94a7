"""Builds the wheel and the sdist, installs each into an empty environment, and tries the command and the library there.

    python tests/versions/distributions.py [DIRECTORY]

Keeps both in the directory, if one is named. Prints the content of each; exits with an error if something fails. Needs
``hatchling``, and pip's way to the dependencies.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

import click
from click_man.core import generate_man_page

from ckpttool import __version__
from ckpttool.cli import cli

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "fixtures" / "checkpoints" / "zero2-dp2-bf16"
IMPORTED = """
import sys
import ckpttool
report = ckpttool.inspect(sys.argv[1])
assert len(report.parameters) > 0
heavy = {"torch", "deepspeed", "ray", "fsspec"} & set(sys.modules)
assert not heavy, heavy
import importlib.util
assert importlib.util.find_spec("torch") is None, "the environment is not empty"
print(ckpttool.__file__)
"""


def write_manual(directory: Path) -> None:
    """Write a manual page for the program and for each command."""
    directory.mkdir(exist_ok=True)
    program = click.Context(cli, info_name="ckpttool")
    (directory / "ckpttool.1").write_text(generate_man_page(program, __version__), encoding="utf-8")
    for name in cli.list_commands(program):
        command = cli.get_command(program, name)
        assert command is not None
        page = generate_man_page(click.Context(command, info_name=name, parent=program), __version__)
        (directory / f"ckpttool-{name}.1").write_text(page, encoding="utf-8")


def build(directory: Path) -> list[Path]:
    """Build both, the wheel from the sdist as package indexes have it; the paths."""
    try:
        write_manual(ROOT / "man")
        return _build(directory)
    finally:
        shutil.rmtree(ROOT / "man")


def _build(directory: Path) -> list[Path]:
    environment = dict(os.environ) | {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(directory)]
    subprocess.run([*command, "--target", "sdist"], cwd=ROOT, check=True, capture_output=True, env=environment)
    (sdist,) = directory.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory / "unpacked", filter="data")
    (unpacked,) = (directory / "unpacked").iterdir()
    subprocess.run([*command, "--target", "wheel"], cwd=unpacked, check=True, capture_output=True, env=environment)
    (wheel,) = directory.glob("*.whl")
    return [wheel, sdist]


def check_content(distribution: Path) -> None:
    """It holds every module of the package, the type marker, the parts of pages and the licenses, and no tests."""
    if distribution.suffix == ".whl":
        with zipfile.ZipFile(distribution) as archive:
            names = archive.namelist()
    else:
        with tarfile.open(distribution) as tar:
            names = [name.partition("/")[2] for name in tar.getnames()]
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ckpttool").rglob("*.py")} | {
        "ckpttool/py.typed",
        "ckpttool/__init__.pyi",
    }
    of_pages = (path for kind in ("js", "css", "txt") for path in (ROOT / "ckpttool").rglob(f"static/**/*.{kind}"))
    package |= {path.relative_to(ROOT).as_posix() for path in of_pages}
    assert package <= set(names), sorted(package - set(names))
    assert any(name.endswith("LICENSE") for name in names), names
    assert any(name.endswith("vendor/LICENSES.txt") for name in names), names
    assert distribution.suffix != ".whl" or not [name for name in names if name.endswith(".md")]
    other = {name.partition("/")[0] for name in names} & {"tests", "fixtures", "benchmarks", "docs"}
    assert not other, other
    print(f"{distribution.name}: {len(names)} files, {distribution.stat().st_size:,} bytes")


def try_out(distribution: Path, directory: Path) -> None:
    """Install it into an empty environment, and run commands and the library, away from the source."""
    venv.create(directory / "env")
    python, command = (str(directory / "env" / "bin" / name) for name in ("python", "ckpttool"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*arguments: object) -> str:
        done = subprocess.run(
            [str(a) for a in arguments], cwd=directory, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--quiet", "--no-compile", distribution)
    version = distribution.name.split("-")[1].removesuffix(".tar.gz")
    assert run(command, "--version") == f"ckpttool, version {version}\n"
    pages = {page.name for page in (directory / "env" / "share" / "man" / "man1").iterdir()}
    assert {"ckpttool.1", "ckpttool-consolidate.1"} <= pages, pages
    inspected = json.loads(run(command, "inspect", CHECKPOINT, "--json"))
    report = json.loads(run(command, "consolidate", CHECKPOINT, "out", "--to", "safetensors", "--json"))
    assert (directory / "out" / "model.safetensors").stat().st_size >= report["written"]["nbytes_written"] > 0
    assert inspected["stage"] == 2
    run(command, "inspect", CHECKPOINT, "--html", "page.html")
    assert b"d3-hierarchy" in (directory / "page.html").read_bytes()
    assert str(directory) in run(python, "-c", IMPORTED, CHECKPOINT)
    print(f"{distribution.name}: installed, inspects and consolidates without torch")


def main() -> None:
    """Build and try both."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary).resolve()
        built = build(directory)
        for distribution in built:
            check_content(distribution)
            own = directory / f"of-{distribution.suffix[1:]}"
            own.mkdir()
            try_out(distribution, own)
        for kept in sys.argv[1:2]:
            Path(kept).mkdir(parents=True, exist_ok=True)
            for distribution in built:
                shutil.copy2(distribution, kept)


if __name__ == "__main__":
    main()
