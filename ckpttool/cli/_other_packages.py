"""Commands of other packages: entry points of the group ``ckpttool.extensions``."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

import click

from ckpttool.errors import CkptError
from ckpttool.messages import brief

GROUP = "ckpttool.extensions"
"""Group of entry points: the name is a command, the value its ``click.Command``."""


@cache
def find_command(name: str) -> click.Command | None:
    """Return the command of another package; None if no installed package has it.

    Raises:
        CkptError: Several packages have it, or its code fails or is not a command.
    """
    found = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}  # one package may be installed twice
    if not found:
        return None
    packages = sorted(entry.dist.name if entry.dist is not None else "an unknown package" for entry in found.values())
    if len(found) > 1:
        raise CkptError(name, f"is a command of {' and of '.join(packages)}", "uninstall all but one of them")
    (entry,), (package,) = found.values(), packages
    try:
        command = entry.load()
    except (Exception, SystemExit) as error:
        problem = f"cannot be loaded from {package}: {type(error).__name__}: {brief(str(error))}"
        raise CkptError(name, problem, "update or uninstall that package") from error
    if not isinstance(command, click.Command):
        problem = f"is {type(command).__name__} in {package}, not a click.Command"
        raise CkptError(name, problem, "update or uninstall that package")
    return command
