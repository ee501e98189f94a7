"""No module of the package imports itself by way of others when it is imported."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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


def _graph() -> dict[str, set[str]]:
    modules = _modules()
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = _imported(ast.parse(path.read_text(encoding="utf-8")).body)
        graph[name] = {n if n in modules else n.rpartition(".")[0] for n in found} & modules.keys() - {name}
    return graph


def test_no_module_is_imported_in_a_circle() -> None:
    graph = _graph()
    assert len(graph) > 100
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_circle_is_found() -> None:
    graph = _graph()
    graph["ckpttool.errors"].add("ckpttool.cli")
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()
