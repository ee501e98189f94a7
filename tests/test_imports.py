"""No module imports itself by way of others when it is imported, or a package that it can do without."""

from __future__ import annotations

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckpttool.registry import EXTENSIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROOT = Path(__file__).resolve().parent.parent


def _modules() -> dict[str, Path]:
    paths = sorted((ROOT / "ckpttool").rglob("*.py"))
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def _imported(body: Iterable[ast.stmt]) -> Iterator[str]:
    """What statements import when their module is imported: not inside functions, and not for types alone."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With) and "TYPE_CHECKING" not in ast.dump(node):
            yield from _imported(node.body)


def _imported_anywhere(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield all that statements import, also for type checking and inside functions."""
    yield from _imported(node for part in body for node in ast.walk(part) if isinstance(node, ast.stmt))


@functools.cache
def _statements(read: Callable[[Iterable[ast.stmt]], Iterator[str]] = _imported) -> dict[str, set[str]]:
    """By module, what its statements import."""
    return {name: {*read(ast.parse(path.read_text(encoding="utf-8")).body)} for name, path in _modules().items()}


def _graph(read: Callable[[Iterable[ast.stmt]], Iterator[str]] = _imported) -> dict[str, set[str]]:
    """By module, the modules of the package that it imports."""
    imported = _statements(read)
    return {
        name: {n if n in imported else n.rpartition(".")[0] for n in found} & imported.keys() - {name}
        for name, found in imported.items()
    }


def _needing(package: str) -> set[str]:
    """Modules that import a package, themselves or by way of others."""
    needing = {name for name, found in _statements().items() if any(n.split(".")[0] == package for n in found)}
    graph, size = _graph(), 0
    while size < len(needing):
        size = len(needing)
        needing |= {name for name, found in graph.items() if found & needing}
    return needing


def test_no_module_is_imported_in_a_circle() -> None:
    graph = _graph()
    assert len(graph) > 100
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_modules_outside_formats_import_each_other_neither_for_types_nor_in_functions() -> None:
    """The modules that open checkpoints need one another: to judge an unfinished save, they open its checkpoint."""
    graph = _graph(_imported_anywhere)
    assert "ckpttool.formats.unfinished" in graph["ckpttool.formats.scan"]  # in a function
    TopologicalSorter(
        {name: found for name, found in graph.items() if not name.startswith("ckpttool.formats.")}
    ).prepare()


def test_a_circle_is_found() -> None:
    graph = _graph()
    graph["ckpttool.errors"].add("ckpttool.cli")
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("package", "modules"),
    [
        ("ray", {"ray_run", "ray_train"}),
        ("pyarrow", {"ray_run", "ray_train"}),
        ("s3fs", set()),
    ],
)
def test_a_package_is_needed_by_its_own_integration_alone(package: str, modules: set[str]) -> None:
    of_storage = {name for name in _needing(package) if name.startswith("ckpttool.storage.s3")}
    assert _needing(package) - of_storage <= {f"ckpttool.integrations.{name}" for name in modules}


@pytest.mark.parametrize("package", ["transformers", "accelerate", "lightning"])
def test_a_training_framework_is_needed_by_an_extension_and_its_address_alone(package: str) -> None:
    addresses = {row.name: row.addresses for row in EXTENSIONS}
    for name in _needing(package):
        of_extension = name.startswith("ckpttool.extensions.") and name.split(".")[2]
        assert of_extension or any(name in own for own in addresses.values()), name
