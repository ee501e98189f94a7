"""Writes the public functions into the stub beside ``ckpttool``, with whole signatures and docstrings, for editors.

    python -m tests.golden.stub     # after a change of a public function or of the row of an option

The stub imports each function under a name with an underscore, and ``ckpttool`` finds its module there; the definitions
are at the end. ``test_stub.py`` compares.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import ckpttool
from ckpttool.registry import is_present

STUB = Path(ckpttool.__file__).with_suffix(".pyi")
MARK = "# Written by python -m tests.golden.stub.\n"


def text() -> str:
    """The stub with the functions as they are now."""
    written = STUB.read_text(encoding="utf-8").partition(MARK)[0]
    imported = re.findall(r"(?m)^from (\S+) import (\w+) as _\2$", written)
    functions = [getattr(ckpttool, name) for module, name in imported if is_present(module)]
    return "".join([written, MARK, *map(_definition, functions)])


def _definition(function: Any) -> str:
    """A function, as ``ruff format`` writes it."""
    signature = inspect.signature(function)
    lines: list[str] = []
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in lines:
            lines.append("*")
        default = "" if one.default is one.empty else f" = {one.default!r}"
        lines.append(f"{one.name}: {one.annotation}{default}".replace("'", '"'))
    listed = "".join(["\n", *(f"    {line},\n" for line in lines)]) if lines else ""
    head = f"def {function.__name__}({listed}) -> {signature.return_annotation}:\n"
    return f'\n{head}    """{textwrap.indent(inspect.getdoc(function) or "", "    ").strip()}\n    """\n'


if __name__ == "__main__":
    STUB.write_text(text(), encoding="utf-8")
