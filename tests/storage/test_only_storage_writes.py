"""Only ``ckpttool.storage`` creates, changes and removes files."""

from __future__ import annotations

import ast
from pathlib import Path

import ckpttool

PACKAGE = Path(ckpttool.__file__).parent
CHANGES = {
    "copy_file_range", "fdatasync", "fsync", "ftruncate", "link", "makedirs", "mkdir", "pwrite", "pwritev", "remove",
    "removedirs", "rename", "renames", "replace", "rmdir", "symlink", "truncate", "unlink", "write",
}  # fmt: skip
READS = {"shutil.disk_usage", "shutil.get_terminal_size", "shutil.which"}
SCRATCH = {f"integrations/{name}.py" for name in ("deepspeed/capture", "deepspeed/inject", "live/files", "patches")}
"""Directories that live as long as one call of a framework's own loader or writer."""


def _changes(path: Path) -> list[str]:
    """Calls in a module that change a disk: functions of ``os`` and ``shutil``, ``open`` for writing."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            name = f"{called.value.id}.{called.attr}"
            changes = called.attr in CHANGES if called.value.id == "os" else called.value.id in {"shutil", "tempfile"}
            if changes and name not in READS:
                found.append(name)
        elif isinstance(called, ast.Name) and called.id == "open" and _writes(node):
            found.append("open")
    return found


def _writes(call: ast.Call) -> bool:
    modes = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    return any(not isinstance(mode, ast.Constant) or set(str(mode.value)) & set("wax+") for mode in modes)


def test_only_storage_writes() -> None:
    elsewhere = {}
    inside = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        found = _changes(path)
        if name.startswith("storage/"):
            inside += len(found)
        elif found and not name.startswith("testing/") and name not in SCRATCH:
            elsewhere[name] = found
    assert elsewhere == {}
    assert inside > 10, "the search finds nothing any more"
