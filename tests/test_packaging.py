"""Contents of an installation."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_base_install_is_light() -> None:
    base = [r for r in requires("ckpttool") or [] if "extra ==" not in r]
    names = {re.split(r"[<>=!~ ;]", r)[0].replace("-", "_") for r in base}
    assert names == {"click", "isal", "ml_dtypes", "numpy", "rich"}


def test_the_lowest_versions_that_are_run_are_those_that_are_promised() -> None:
    """What ``make lowest`` installs on the oldest Python is what pyproject.toml allows."""
    project, lowest = ((ROOT / name).read_text() for name in ("pyproject.toml", "requirements/lowest.txt"))
    (block,) = re.findall(r"^dependencies = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)
    promised = {name: _release(version) for name, version in re.findall(r'"([\w-]+)>=([\d.]+)"', block)}
    pins: dict[str, list[int]] = {}
    for name, version in re.findall(r"^([\w-]+)==([\d.]+)", lowest, re.MULTILINE):
        pins.setdefault(name, _release(version))
    assert len(promised) == 5
    assert {name: pins[name] for name in promised} == promised


def _release(version: str) -> list[int]:
    """A version such as 8.2 with three numbers, as 8.2.0."""
    return [*map(int, version.split(".")), 0, 0][:3]
