"""Write the page fragment with the fields that ``--json`` prints.

Names and types come from the file that the tests compare with the output of each command, meanings from the texts under
the fields of the classes.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CLASSES = {"extract": "ExtractReport", "inspect --param": "State", "prune": "Decision"}
"""Class of the fields of a command's object, if the function of its name does not return it."""
OF_ITEMS = {"checkpoints": "Checkpoint", "extents": "", "tensors": "TensorStats", "decisions": "Decision"}
"""Classes of the items under the keys that only the output has."""


class Field(NamedTuple):
    """A field of a class."""

    annotation: str
    meaning: str


def write(path: Path) -> None:
    """Write a table for each command."""
    golden = [ROOT / "tests/golden/interface.json", *(ROOT / "tests/extensions").glob("*/interface.json")]
    described = [json.loads(path.read_text(encoding="utf-8")) for path in golden]
    recorded = {command: fields for one in described for command, fields in one["json"].items()}
    names = {name: signature for one in described for name, signature in one["names"].items()}
    classes = _classes()
    lines: list[str] = []
    for command, fields in sorted(recorded.items()):
        lines += [f"## {command}", "", "| field | type | meaning |", "| --- | --- | --- |"]
        owner = CLASSES.get(command) or names[command].rpartition(" -> ")[2].partition(" ")[0]
        rows = _rows(fields, owner, classes)
        lines += [f"| `{name}` | {kind} | {meaning} |" for name, kind, meaning in rows if name != "version"]
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")


def _classes() -> dict[str, dict[str, Field]]:
    """The fields and properties of every class of the package that have a text."""
    found: dict[str, dict[str, Field]] = {}
    for path in sorted((ROOT / "ckpttool").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, {}).update(_fields(node))
    return found


def _fields(node: ast.ClassDef) -> dict[str, Field]:
    fields = {}
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.FunctionDef) and (described := ast.get_docstring(item)):
            fields[item.name] = Field(ast.unparse(item.returns) if item.returns else "", described.partition("\n\n")[0])
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            fields[item.target.id] = Field(ast.unparse(item.annotation), str(text))
    return fields


def _rows(value: Any, owner: str, classes: dict[str, dict[str, Field]], prefix: str = "") -> list[tuple[str, str, str]]:
    """One row for each field, and for the fields of the objects in it."""
    rows = []
    for name, inner in value.items():
        field = classes.get(owner, {}).get(name, Field("", ""))
        meaning = " ".join(field.meaning.replace("``", "`").replace("|", r"\|").split())
        rows.append((prefix + name, _kind(inner), meaning))
        inside, items = _inside(inner)
        # An object with the names of parameters or states as its keys has no fields.
        if inside and (items or ("dict" not in field.annotation and "Mapping" not in field.annotation)):
            named = [word for word in re.findall(r"\w+", field.annotation) if word in classes]
            kind = OF_ITEMS.get(name, named[-1] if named else owner)
            rows += _rows(inside, kind, classes, f"{prefix}{name}{items}.")
    return rows


def _inside(value: Any, items: str = "") -> tuple[dict[str, Any], str]:
    """The fields of an object, or of the objects in an array, which adds "[]"; none for other values."""
    if isinstance(value, list):
        return _inside(value[0], f"{items}[]") if value else ({}, items)
    if isinstance(value, dict):
        return _inside(value["either"][0], items) if "either" in value else (value, items)
    return {}, items


def _kind(value: Any) -> str:
    """The type of a value in a word."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return f"array of {_kind(value[0])}" if value else "array"
    return " or ".join(map(_kind, value["either"])) if "either" in value else "object"
