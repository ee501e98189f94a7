"""The extensions: features beside the core, each in one folder ``ckpttool/extensions/NAME`` with one row here.

The core imports no extension. It finds commands and public names of extensions by these rows, which are plain strings:
an extension is imported when it is used. Without its folder, its addresses and its row, the core is whole.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Command(NamedTuple):
    """A command of an extension."""

    name: str
    """The command, and the name of its ``click.Command`` in the module."""
    section: str
    """Section of ``ckpttool --help``."""
    after: str
    """The command of the core that the help lists before it."""
    module: str
    """Module to import when the command is called."""


class Extension(NamedTuple):
    """The row of an extension. Its names in ``ckpttool`` are in the stub beside ``ckpttool``."""

    name: str
    """Name of its folder."""
    commands: tuple[Command, ...] = ()
    """Its commands."""
    addresses: tuple[str, ...] = ()
    """Modules in other packages that only export its public names. They are removed with it."""
    after_capture: str = ""
    """Function that every rank calls at a save with the captured state; returns a ``saving.two_phase.Record``."""
    before_load: str = ""
    """Function that every rank calls before a load reads; it may raise an error."""
    after_load: str = ""
    """Function that every rank calls after a load; it returns the report, or raises an error on all ranks."""


EXTENSIONS: tuple[Extension, ...] = (
    Extension("accelerate", addresses=("ckpttool.integrations.accelerate",)),
    Extension("huggingface", addresses=("ckpttool.integrations.huggingface",)),
    Extension("lightning", addresses=("ckpttool.integrations.lightning",)),
    Extension(
        "proof",
        after_capture="ckpttool.extensions.proof.hooks.after_capture",
        before_load="ckpttool.extensions.proof.hooks.before_load",
        after_load="ckpttool.extensions.proof.hooks.after_load",
    ),
    Extension("sampler", addresses=("ckpttool.data",)),
    Extension("stats", commands=(Command("stats", "Look", "diff", "ckpttool.extensions.stats.command"),)),
)  # fmt: skip
"""One row for each extension."""
_FOLDER = f"{__package__}.extensions"


def is_present(module: str) -> bool:
    """Return whether a module belongs to the core, or to an extension that has a row."""
    return not module.startswith(f"{_FOLDER}.") or module.split(".")[2] in {one.name for one in EXTENSIONS}


def with_extensions(sections: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return the modules of commands by section and command: the given ones, and each of an extension at its place."""
    commands = [command for extension in EXTENSIONS for command in extension.commands]
    found: dict[str, dict[str, str]] = {section: {} for section in sections}
    for section, modules in sections.items():
        for name, module in modules.items():
            found[section][name] = module
            found[section] |= {c.name: c.module for c in commands if (c.section, c.after) == (section, name)}
    return found


def functions_at(point: str) -> list[Callable[..., Any]]:
    """Return the functions of extensions that the core calls at a point of a save or a load, such as "after_load"."""
    addresses = [getattr(extension, point).rpartition(".") for extension in EXTENSIONS]
    return [getattr(importlib.import_module(module), name) for module, _, name in addresses if module]
