"""The core is whole without the extensions: without all of them, and without each one."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import ckpttool
from ckpttool.cli import COMMANDS
from ckpttool.registry import EXTENSIONS, Command, Extension, with_extensions
from docs.generators import extension_pages
from tests.docs.blocks import PAGES

ROOT = Path(__file__).resolve().parent.parent
NAMES = [extension.name for extension in EXTENSIONS]
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "_build", "_generated", ".data", "build", "dist"
)
CORE = [
    f"tests/{name}.py"
    for name in ("test_imports", "test_of_module", "cli/test_suggestions", "cli/test_messages", "docs/test_links")
]
"""Tests of the core that use many of its modules; they take seconds."""
OF_EXTENSIONS = """
import ckpttool
assert ckpttool.__file__.startswith({copy!r}), ckpttool.__file__
for name in {names!r}:
    try:
        getattr(ckpttool, name)
    except AttributeError as error:
        assert str(error) == f"module 'ckpttool' has no attribute {{name!r}}", error
    else:
        raise AssertionError(name)
"""
"""Looks for public names of extensions that are not there."""


def _without(removed: list[str], copy: Path) -> None:
    """Copy the repository without some extensions: without their folders, their addresses and their rows.

    Their lines in the stub stay; the functions that type checkers see are written again.
    """
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED, symlinks=True)
    for name in removed:
        shutil.rmtree(copy / "ckpttool" / "extensions" / name)
        shutil.rmtree(copy / "tests" / "extensions" / name)
    for address in (address for row in EXTENSIONS if row.name in removed for address in row.addresses):
        Path(copy, *address.split(".")).with_suffix(".py").unlink()
    registry = copy / "ckpttool" / "registry.py"
    lines = registry.read_text(encoding="utf-8").splitlines(keepends=True)
    for row in ast.walk(ast.parse("".join(lines))):
        if isinstance(row, ast.Call) and isinstance(row.func, ast.Name) and row.func.id == Extension.__name__:
            assert isinstance(row.args[0], ast.Constant)
            if row.args[0].value in removed:
                lines[row.lineno - 1 : row.end_lineno] = [""] * ((row.end_lineno or 0) - row.lineno + 1)
    registry.write_text("".join(lines), encoding="utf-8")
    _run(copy, "-m", "tests.golden.stub")


def _run(copy: Path, *arguments: str) -> str:
    """Run Python in a copy of the repository, and return the output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=copy, env=environment | {"PYTHONPATH": str(copy)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _names(removed: list[str]) -> list[str]:
    """Names of ``ckpttool`` in some extensions."""
    packages = tuple(f"ckpttool.extensions.{name}." for name in removed)
    ckpttool.__dir__()
    return [name for name, module in vars(ckpttool)["_modules"].items() if module.startswith(packages)]


def _check_core(removed: list[str], copy: Path) -> None:
    _without(removed, copy)
    _run(copy, "-c", OF_EXTENSIONS.format(copy=str(copy), names=_names(removed)))
    shown = _run(copy, "-m", "ckpttool", "--help")
    assert "  inspect  " in shown
    commands = [command.name for extension in EXTENSIONS if extension.name in removed for command in extension.commands]
    assert [name for name in commands if f"\n  {name} " in shown] == []
    _run(copy, "examples/demo.py")


@pytest.mark.slow
def test_the_core_is_whole_without_extensions(tmp_path: Path) -> None:
    assert sorted(path.parent.name for path in (ROOT / "ckpttool" / "extensions").glob("*/__init__.py")) == sorted(
        NAMES
    )
    pages = dict(extension_pages.files())
    for page in (page for page in PAGES if page.is_relative_to(ROOT / "docs")):
        name, text = page.relative_to(ROOT / "docs").as_posix(), page.read_text(encoding="utf-8")
        assert {extension_pages.target(name, link) for link in extension_pages.LINK.findall(text)} <= pages.keys(), page
    _check_core(NAMES, tmp_path / "copy")
    _run(tmp_path / "copy", "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE)


@pytest.mark.thorough
@pytest.mark.parametrize("removed", [NAMES, *([name] for name in NAMES)], ids=["all", *NAMES])
def test_the_quick_tests_of_the_core_pass(removed: list[str]) -> None:
    """Some pages of the core name or show extensions: the tests of pages are left out."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)  # tests of the rights of other users enter it
        copy = Path(directory, "copy")
        _check_core(removed, copy)
        in_two = ("-n", "2", "--dist", "loadfile")
        _run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *in_two, "--quick", "--ignore=tests/docs")


@pytest.mark.parametrize("row", EXTENSIONS, ids=NAMES)
def test_an_address_only_exports_names_of_its_extension(row: Extension) -> None:
    for address in row.addresses:
        for node in ast.parse(Path(ROOT, *address.split(".")).with_suffix(".py").read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").startswith(f"ckpttool.extensions.{row.name}.")
            else:
                assert isinstance(node, ast.Expr | ast.Assign | ast.If)  # docstring, __all__, running as a program


def test_only_addresses_import_extensions() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.findall(r'"([\w.]+) -> ckpttool\.extensions\.(\w+)\.', text)
    ignored = [(address, name) for address, name in found if name in NAMES]  # others are removed
    assert ignored == sorted((address, row.name) for row in EXTENSIONS for address in row.addresses)


def test_a_row_gives_a_command_its_place() -> None:
    for extension in EXTENSIONS:
        for command in extension.commands:
            assert COMMANDS[command.name] == command.module
            assert command.module.startswith(f"ckpttool.extensions.{extension.name}.")


def test_the_help_lists_a_command_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Extension("a", commands=(Command("x", "Look", "verify", "a.x"),))
    monkeypatch.setattr("ckpttool.registry.EXTENSIONS", (row,))
    found = with_extensions({"Look": {"inspect": "i", "verify": "v", "diff": "d"}, "Keep": {"ls": "l"}})
    assert [*found["Look"].items()] == [("inspect", "i"), ("verify", "v"), ("x", "a.x"), ("diff", "d")]
    assert found["Keep"] == {"ls": "l"}
