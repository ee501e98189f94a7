"""Commands of other packages: one is installed and runs; a broken one is named, and stops no other command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckpttool as api
from tests.cli.command import ckpttool, ckpttool_process
from tests.truth import source

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "extension"
SRC = source("zero2-dp2-bf16")


def _install(directory: Path, package: str, entries: str, **modules: str) -> None:
    """Write the files that an installer writes for a package."""
    metadata = directory / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[ckpttool.extensions]\n{entries}\n")
    for name, code in modules.items():
        (directory / f"{name}.py").write_text(code)


@pytest.mark.slow
def test_an_installed_package_adds_a_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(tmp_path), str(EXAMPLE)], check=True, cwd=tmp_path)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = ckpttool_process("shapes", SRC, env=os.environ | {"PYTHONPATH": path})
    assert (done.code, done.stderr) == (0, "")
    parameters = api.inspect(SRC).parameters
    assert [line.split()[1] for line in done.stdout.splitlines()] == [parameter.name for parameter in parameters]
    failed = ckpttool_process("shapes", tmp_path, env=os.environ | {"PYTHONPATH": path})
    assert "contains no checkpoint" in failed.error
    assert ckpttool_process("shapes", SRC).code == 2, "it is not installed here"


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ("odd_missing:command", None),
        ("odd_failing:command", "raise RuntimeError('needs another release')"),
        ("odd_ending:command", "import sys; sys.exit(5)"),
        ("odd_text:command", "command = 'text'"),
    ],
)
def test_a_broken_package_is_named(
    entry: str, code: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = entry.partition(":")[0]
    _install(tmp_path, "ckpttool-odd", f"{name} = {entry}", **({} if code is None else {name: code}))
    monkeypatch.syspath_prepend(tmp_path)
    error = ckpttool(name).error
    assert error.startswith(f"Error: {name}: ")
    assert "ckpttool-odd" in error
    assert error.endswith("; update or uninstall that package")
    assert ckpttool("inspect", SRC).code == 0
    assert ckpttool("--help").code == 0


def test_a_command_of_two_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        code = f"import click\n\n@click.command()\ndef command():\n    click.echo({name!r})\n"
        _install(tmp_path, f"ckpttool-{name}", f"twice = {name}_twice:command", **{f"{name}_twice": code})
    monkeypatch.syspath_prepend(tmp_path)
    error = ckpttool("twice").error
    assert error.endswith("twice: is a command of ckpttool-first and of ckpttool-second; uninstall all but one of them")


def test_a_package_replaces_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "ckpttool-odd", "inspect = odd_inspect:command", odd_inspect="raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert ckpttool("inspect", SRC).code == 0
