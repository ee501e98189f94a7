"""Name the tests of a module: ``python -m tests.of_module ckpttool/plan/split.py ...``; ``make test-of`` runs them.

They are the test file of its name in the directory of its package, the test files that import it or a helper that does,
and if there is none of either, that directory. Tests of functions of ``ckpttool.api``, the commands, are in others too.
"""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIRECTORIES = {
    "ckpttool/api": ["tests/cli", "tests/targets"],
    "ckpttool/formats/zero": ["tests/formats"],
    "ckpttool/integrations": ["tests/integrations", "tests/under_ray"],
    "ckpttool/integrations/deepspeed": ["tests/deepspeed"],
    "ckpttool/integrations/live": ["tests/deepspeed", "tests/integrations"],
    "ckpttool/integrations/torch": ["tests/integrations", "tests/deepspeed"],
    "ckpttool/model": ["tests/formats", "tests/plan", "tests/property"],
}
"""Directories of tests by package, where they are not of one name."""


def tests_of(module: str) -> list[str]:
    """Return the test files of a module, or the directories of tests of its package; paths below the repository.

    Args:
        module: Path below the repository: "ckpttool/plan/split.py".
    """
    name = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    stem = name.rpartition(".")[2].lstrip("_")
    own = [ROOT / directory for directory in directories_of(module)]

    def is_of_its_name(path: Path) -> bool:
        return path.stem == f"test_{stem}" and (path.parent in own or module.startswith("ckpttool/api/"))

    found = [path for path in _test_files() if is_of_its_name(path) or name in _imported(path)]
    return [path.relative_to(ROOT).as_posix() for path in found] or directories_of(module)


def directories_of(module: str) -> list[str]:
    """Return the directories of tests of the package of a module."""
    for package in Path(module).parents:
        if package.as_posix() in DIRECTORIES:
            return DIRECTORIES[package.as_posix()]
        same = Path("tests", *package.parts[1:])
        if len(same.parts) > 1 and (ROOT / same).is_dir():
            return [same.as_posix()]
    return ["tests/test_packaging.py"]


def modules() -> list[str]:
    """Return the paths of all modules of the package."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "ckpttool").rglob("*.py"))


@functools.cache
def _test_files() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


@functools.cache
def _imported(path: Path) -> frozenset[str]:
    """Names of the modules that a file of tests imports, itself or by way of helpers."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    for name in [name for name in found if name.startswith("tests.")]:
        helper = ROOT / f"{name.replace('.', '/')}.py"
        if helper.exists() and not helper.name.startswith("test_") and helper != path:
            found |= _imported(helper)
    return frozenset(found)


def main(arguments: list[str]) -> None:
    """Print the tests of the given modules, one in a line."""
    unknown = [module for module in arguments if module not in modules()]
    if unknown or not arguments:
        sys.exit(f"{', '.join(unknown) or 'nothing given'}: not a module, such as ckpttool/plan/split.py")
    print("\n".join(dict.fromkeys(test for module in arguments for test in tests_of(module))))  # noqa: T201 (a script)


if __name__ == "__main__":
    main(sys.argv[1:])
