"""What the README and the examples say is true: commands are run and their output compared, Python is executed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
CONSOLE = [body for kind, body in BLOCKS if kind == "console"]
PYTHON = [body for kind, body in BLOCKS if kind == "python"]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that sees the fixtures under the name the README uses."""
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run(*arguments: str) -> str:
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_readme_shows_something() -> None:
    assert len(CONSOLE) >= 4
    assert PYTHON


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("block", CONSOLE, ids=lambda b: b.split("\n")[0])
def test_commands_print_what_the_readme_shows(block: str) -> None:
    command, _, shown = block.partition("\n")
    name, *arguments = shlex.split(command.removeprefix("$ "))
    assert name == "ckpttool"
    printed = _run("-m", "ckpttool", *arguments)
    assert _without_times(printed) == _without_times(shown)


def _without_times(text: str) -> str:
    return re.sub(r"in \d+\.\d s", "in 0.0 s", text)


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("block", PYTHON, ids=lambda b: b.split("\n")[0])
def test_python_in_the_readme_runs(block: str) -> None:
    assert _run("-c", block)


def test_the_library_example_runs(workplace: Path) -> None:
    out = workplace / "out"
    printed = _run(str(ROOT / "examples" / "library.py"), "fixtures/checkpoints/zero3-dp3-bf16", str(out))
    assert "ZeRO-3 over 3 ranks" in printed
    assert (out / "model.safetensors").exists()


def test_the_demo_runs_and_finds_every_weight_equal(tmp_path: Path) -> None:
    printed = _run(str(ROOT / "examples" / "demo.py"), str(tmp_path / "out"))
    assert "20 of 20 equal, bit for bit" in printed


def test_every_example_is_run_here() -> None:
    assert {p.name for p in (ROOT / "examples").glob("*.py")} == {"demo.py", "library.py"}


def test_the_changelog_names_this_version() -> None:
    from ckpttool import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_project_speaks_of_itself_alone() -> None:
    """No path of a developer's machine in anything that is committed."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    here = os.path.dirname(ROOT) + "/"
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ".yaml", ".json"} and path.exists():
            assert here not in path.read_text(encoding="utf-8"), name
