"""Choose the tests of ``make quick``: fast ones that need neither torch nor DeepSpeed nor Ray."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests import sampling

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pytest

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = {"deepspeed", "ray", "gpu", "slow"}
"""Marks of tests that ``make quick`` leaves out."""
PACKAGE_OF_FIXTURE = {"s3_server": "moto", "small_parts": "moto"}
"""Packages that fixtures import."""


def is_left_out(item: pytest.Item) -> bool:
    """Return whether a test is slow, or needs a package that is not installed, or Linux on another system."""
    if item.get_closest_marker("linux") and not hasattr(os, "copy_file_range"):
        return True
    if any(item.get_closest_marker(mark) for mark in LEFT_OUT):
        return True
    needed = {package for fixture, package in PACKAGE_OF_FIXTURE.items() if fixture in item.fixturenames}  # type: ignore[attr-defined]
    if any(importlib.util.find_spec(package) is None for package in needed):
        return True
    if "s3" in sampling.texts(item) and importlib.util.find_spec("moto") is None:
        return True
    return sampling.is_left_out(item)


@functools.cache
def missing_package(path: Path) -> str:
    """Return the first package that a test file imports, itself or through a helper, and that is not installed."""
    for name in _imports(ast.parse(path.read_text(encoding="utf-8")).body):
        package = "torch" if name.startswith("safetensors.torch") else name.partition(".")[0]
        if package in {"tests", "ckpttool"}:
            helper = ROOT / f"{name.replace('.', '/')}.py"
            if helper.exists() and (found := missing_package(helper)):
                return found
        elif package not in sys.stdlib_module_names and importlib.util.find_spec(package) is None:
            return package
    return ""


def _imports(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Names of the modules that statements import when they run, and of what they import from those."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _imports(node.body)
