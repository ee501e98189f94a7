"""Extensions of other packages: one is installed and works; a broken one is named, and stops nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ckpttool as api
from ckpttool.errors import ArgumentError
from ckpttool.other_packages import others
from tests.cli.command import ckpttool, ckpttool_process
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "extension"
SRC = source("zero2-dp2-bf16")
EXTENSION = "from ckpttool.registry import Extension, Target\n"


def _install(directory: Path, package: str, entries: str, **modules: str) -> None:
    """Write the files that an installer writes for a package, and its modules."""
    metadata = directory / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[ckpttool.extensions]\n{entries}\n")
    for name, code in modules.items():
        (directory / f"{name}.py").write_text(code)


@pytest.fixture(autouse=True)
def looked_up_again() -> Iterator[None]:
    others.cache_clear()
    yield
    others.cache_clear()


@pytest.mark.slow
def test_an_installed_package_adds_a_command_and_a_format(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(tmp_path), str(EXAMPLE)], check=True, cwd=tmp_path)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    there = os.environ | {"PYTHONPATH": path}
    done = ckpttool_process("shapes", SRC, env=there)
    assert (done.code, done.stderr) == (0, "")
    parameters = api.inspect(SRC).parameters
    assert [line.split()[1] for line in done.stdout.splitlines()] == [parameter.name for parameter in parameters]
    failed = ckpttool_process("shapes", tmp_path, env=there)
    assert "contains no checkpoint" in failed.error
    assert ckpttool_process("shapes", SRC).code == 2, "it is not installed here"
    arrays: dict[str, Any] = {
        "up.weight": np.arange(12, dtype="f4").reshape(3, 4),
        "half": np.ones(5, "f2"),
        "steps": np.array(7),
    }
    np.savez(tmp_path / "model.npz", **arrays)
    made = ckpttool_process(
        "consolidate", "model.npz", "out", "--to", "safetensors", "--prove", env=there, cwd=tmp_path
    )
    assert (made.code, made.stderr) == (0, "")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == {n: a.tolist() for n, a in arrays.items()}
    shown = ckpttool_process("inspect", tmp_path / "model.npz", env=there)
    assert shown.stdout.startswith("model.npz: npz, fp32")
    assert ckpttool_process("inspect", tmp_path / "model.npz").code == 3, "it is not installed here"
    data = (tmp_path / "model.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(data[:-100])
    assert ckpttool_process("inspect", tmp_path / "cut.npz", env=there).error.startswith(f"Error: {tmp_path}/cut.npz: ")


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (None, "cannot be loaded: ModuleNotFoundError: "),
        ("raise RuntimeError('needs another release')", "cannot be loaded: RuntimeError: needs another release"),
        ("import sys; sys.exit(5)", "cannot be loaded: SystemExit: 5"),
        ("row = 'text'", "is str, not an Extension of ckpttool.registry"),
        (f"{EXTENSION}row = Extension('odd', commands=5)", "has commands that are not a tuple of Command"),
        (f"{EXTENSION}row = Extension('odd', formats=('a.read',))", "has formats that are not a tuple of Format"),
        (
            f"{EXTENSION}row = Extension('odd', targets=Target('a', 'b.c', 'd'))",
            "has targets that are not a tuple of Target",
        ),
    ],
)
def test_a_broken_package_is_named_and_stops_nothing(
    code: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, "ckpttool-odd", "odd = odd_module:row", **({} if code is None else {"odd_module": code}))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_module", raising=False)
    failed = ckpttool("shape")
    assert (failed.code, "no command 'shape'" in failed.stderr) == (2, True)
    line = failed.stderr.splitlines()[-1]
    assert line.startswith(f"note: the extension odd of ckpttool-odd {problem}")
    assert line.endswith("; update or uninstall that package")
    assert "note: the extension odd" in ckpttool("convert", SRC, tmp_path / "out", "--to", "mine").stderr
    assert ckpttool("inspect", SRC).code == 0
    assert ckpttool("--help").code == 0
    told = ckpttool("consolidate", tmp_path, tmp_path / "out", "--to", "safetensors").stderr
    assert told.startswith(f"Error: {tmp_path}: contains no checkpoint")
    assert "note: the extension odd" in told


def test_a_slow_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = "from ckpttool.registry import Extension\n\nrow = Extension('slow')\n"
    _install(tmp_path, "ckpttool-slow", "slow = slow_module:row", slow_module=row)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("ckpttool.other_packages.SLOW_SECONDS", -1.0)
    assert "note: the extension slow of ckpttool-slow took 0." in ckpttool("shape").stderr


ROW = """
from ckpttool.registry import Command, Extension, Format, Target

row = Extension(
    {name!r},
    commands=(Command("twice", "Look", "", "{name}_code"), Command("fails", "Look", "", "{name}_code")),
    formats=(Format("{name}_code.read", {{{name!r}: "text"}}),),
    targets=(
        Target({name!r}, "{name}_code.plan", "a loader"),
        Target("checked", "{name}_code.plan", "a loader", checker="{name}_code.read"),
    ),
)
"""


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a package with a command, a format and a target that fail."""
    code = "import click\n\n\ndef read(*given):\n    raise KeyError('mine')\n\n\ndef plan(*given):\n    return read()\n"
    code += "\n\ntwice = 'text'\n\n\n@click.command()\ndef fails():\n    read()\n"
    _install(tmp_path, "ckpttool-first", "first = first_row:row", first_row=ROW.format(name="first"), first_code=code)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_an_error_in_the_code_of_a_package_names_it(first: Path) -> None:
    problem = "fails in the extension ckpttool-first: "
    assert ckpttool("twice").error == (
        f"Error: twice: {problem}TypeError: it is str, not a Command; update or uninstall that package"
    )
    assert ckpttool("fails").error == f"Error: fails: {problem}KeyError: 'mine'; update or uninstall that package"
    assert ckpttool("fails", "--what").code == 2
    assert ckpttool("convert", SRC, first / "out", "--to", "checked").error == (
        f"Error: checked: {problem}KeyError: 'mine'; update or uninstall that package"
    )
    (first / "file.odd").write_text("x")
    told = ckpttool("inspect", first / "file.odd")
    assert (told.code, told.error) == (
        3, f"Error: {first}/file.odd: {problem}KeyError: 'mine'; update or uninstall that package",
    )  # fmt: skip
    made = ckpttool("convert", SRC, first / "out", "--to", "first")
    assert (made.code, made.error) == (
        3, f"Error: {SRC}/global_step3: {problem}KeyError: 'mine'; update or uninstall that package",
    )  # fmt: skip
    assert not (first / "out").exists()


def test_a_command_or_a_target_of_two_packages_is_refused(first: Path) -> None:
    _install(first, "ckpttool-second", "second = second_row:row", second_row=ROW.format(name="second"))
    packages = "of ckpttool-first and of ckpttool-second; uninstall all but one of them"
    assert ckpttool("twice").error.endswith(f"twice: is a command {packages}")
    made = ckpttool("convert", SRC, first / "out", "--to", "checked")
    assert (made.code, made.error) == (3, f"Error: checked: is a target {packages}")


def test_a_package_replaces_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "ckpttool-odd", "inspect = odd_inspect:row", odd_inspect="raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert ckpttool("inspect", SRC).code == 0
    untyped: Any = api
    with pytest.raises(ArgumentError, match=r"not zero, universal,? (or )?dcp"):
        untyped.convert(SRC, tmp_path / "out", to="odd")
