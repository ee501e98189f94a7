"""Extensions in other packages: entry points of the group ``ckpttool.extensions``, each a row of the registry.

They are looked up where no row of ckpttool answers: a command, a format or a target that it does not know.
"""

from __future__ import annotations

import contextlib
import time
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ckpttool.errors import CkptError
from ckpttool.messages import printable
from ckpttool.registry import Extension, imported

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import EntryPoint

    from ckpttool.registry import Format, Target

T = TypeVar("T")
GROUP = "ckpttool.extensions"
"""Group of entry points: the value is an ``Extension``."""
SLOW_SECONDS = 1.0
"""Time to load a row above which the log names the package."""


class Other(NamedTuple):
    """The extension of another package."""

    row: Extension
    """Its commands, formats and targets are used."""
    package: str
    """Name of the package."""


@cache
def others() -> tuple[Other, ...]:
    """Return the extensions of other packages; the log names those that cannot be loaded, and slow ones."""
    from importlib.metadata import entry_points  # few runs need it

    found = {(entry.name, entry.value): entry for entry in entry_points(group=GROUP)}  # one may be installed twice
    return tuple(other for entry in found.values() if (other := _load(entry)) is not None)


def _load(entry: EntryPoint) -> Other | None:
    package = entry.dist.name if entry.dist is not None else "an unknown package"
    began = time.perf_counter()
    try:
        row = entry.load()
    except (Exception, SystemExit) as error:
        _warn(entry, package, f"cannot be loaded: {type(error).__name__}: {printable(str(error), 300)}")
        return None
    if not isinstance(row, Extension):
        _warn(entry, package, f"is {type(row).__name__}, not an Extension of ckpttool.registry")
        return None
    if (seconds := time.perf_counter() - began) > SLOW_SECONDS:
        _warn(entry, package, f"took {seconds:.1f} s to load")
    return Other(row, package)


def _warn(entry: EntryPoint, package: str, problem: str) -> None:
    import logging  # most runs look up no other package

    logging.getLogger(__name__).warning(
        "the extension %s of %s %s; update or uninstall that package", entry.name, package, problem
    )


def call(code: str, path: str, *arguments: Any) -> Any:
    """Call a function of a row; an error in the code of another package names the package.

    Args:
        code: Address of the function.
        path: The checkpoint.
        arguments: Its arguments.

    Raises:
        CkptError: It raises one, or the code of another package raises any error.
    """
    if code.startswith(f"{__package__}."):
        return imported(code)(*arguments)
    with naming(code, path):
        return imported(code)(*arguments)


def find_command(name: str, kind: type[T]) -> T | None:
    """Return the command of another package; None if no installed package has it.

    Args:
        name: The command.
        kind: Class of commands.

    Raises:
        CkptError: Several packages have it, or its code fails or is not a command.
    """
    found = {other.package: command for other in others() for command in other.row.commands if command.name == name}
    if not found:
        return None
    if len(found) > 1:
        raise CkptError(name, f"is a command of {' and of '.join(sorted(found))}", "uninstall all but one of them")
    (command,) = found.values()
    code = f"{command.module}.{name}"
    with naming(code, name):
        made = imported(code)
        if not isinstance(made, kind):
            raise TypeError(f"it is {type(made).__name__}, not a {kind.__name__}")
    return made


def formats() -> list[Format]:
    """Return the formats that other packages read."""
    return [known for other in others() for known in other.row.formats]


def find_target(name: str) -> Target | None:
    """Return the target of another package; None if no installed package has it."""
    return next((target for other in others() for target in other.row.targets if target.name == name), None)


@contextlib.contextmanager
def naming(code: str, path: str) -> Iterator[None]:
    """Context manager: an error in the code of another package, other than of ckpttool, names the package.

    Args:
        code: Address of the code.
        path: The command, or the checkpoint.

    Raises:
        CkptError: For any such error.
    """
    try:
        yield
    except CkptError:
        raise
    except (Exception, SystemExit) as error:
        from importlib.metadata import packages_distributions

        module = code.partition(".")[0]
        package = " or ".join(packages_distributions().get(module, [module]))
        problem = f"fails in the extension {package}: {type(error).__name__}: {printable(str(error), 300)}"
        raise CkptError(path, problem, "update or uninstall that package") from error
