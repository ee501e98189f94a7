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
from ckpttool.registry import Command, Extension, Format, Target, imported

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.metadata import EntryPoint

T = TypeVar("T")
R = TypeVar("R", Command, Target)
GROUP = "ckpttool.extensions"
"""Group of entry points: the value is an ``Extension``."""
SLOW_SECONDS = 1.0
"""Time to load a row above which a problem names the package."""


class Other(NamedTuple):
    """The extension of another package."""

    row: Extension | None
    """Its commands, formats and targets are used; None if it cannot be loaded."""
    package: str
    """Name of the package."""
    problem: str = ""
    """Why it cannot be loaded, or that it is slow, as text for the user."""

    def has(self, code: str) -> bool:
        """Return whether a function of the row has an address."""
        if self.row is None:
            return False
        commands = (f"{command.module}.{command.name}" for command in self.row.commands)
        readers = (known.reader for known in self.row.formats)
        return code in {*commands, *readers, *(a for t in self.row.targets for a in (t.planner, t.checker))}


@cache
def others() -> tuple[Other, ...]:
    """Return the extensions of other packages."""
    from importlib.metadata import entry_points  # few runs need it

    found = {(entry.name, entry.value): entry for entry in entry_points(group=GROUP)}  # one may be installed twice
    return tuple(map(_load, found.values()))


def problems() -> list[str]:
    """Return the problems of the extensions, if they were looked up."""
    return [other.problem for other in others() if other.problem] if others.cache_info().currsize else []


def _load(entry: EntryPoint) -> Other:
    package = entry.dist.name if entry.dist is not None else "an unknown package"
    name, advice = f"the extension {entry.name} of {package}", "update or uninstall that package"
    began = time.perf_counter()
    try:
        row = entry.load()
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {printable(str(error), 300)}"
        return Other(None, package, f"{name} cannot be loaded: {why}; {advice}")
    if not isinstance(row, Extension):
        return Other(None, package, f"{name} is {type(row).__name__}, not an Extension of ckpttool.registry; {advice}")
    for kind in (Command, Format, Target):
        field = f"{kind.__name__.lower()}s"
        values = getattr(row, field)
        if not isinstance(values, (tuple, list)) or not all(isinstance(value, kind) for value in values):
            return Other(None, package, f"{name} has {field} that are not a tuple of {kind.__name__}; {advice}")
    seconds = time.perf_counter() - began
    return Other(row, package, f"{name} took {seconds:.1f} s to load; {advice}" if seconds > SLOW_SECONDS else "")


def _rows() -> list[tuple[Extension, str]]:
    return [(other.row, other.package) for other in others() if other.row is not None]


def find_command(name: str, kind: type[T]) -> tuple[T, str] | None:
    """Return the command of another package and its address; None if no installed package has it.

    Args:
        name: The command.
        kind: Class of commands.

    Raises:
        CkptError: Several packages have it, or its code fails or is not a command.
    """
    command = _only("command", name, [(one, package) for row, package in _rows() for one in row.commands])
    if command is None:
        return None
    code = f"{command.module}.{name}"
    with naming(code, name):
        made = imported(code)
        if not isinstance(made, kind):
            raise TypeError(f"it is {type(made).__name__}, not a {kind.__name__}")
    return made, code


def formats() -> list[Format]:
    """Return the formats that other packages read."""
    return [known for row, _ in _rows() for known in row.formats]


def find_target(name: str) -> Target | None:
    """Return the target of another package; None if no installed package has it.

    Raises:
        CkptError: Several packages have it.
    """
    return _only("target", name, [(one, package) for row, package in _rows() for one in row.targets])


def _only(kind: str, name: str, rows: Sequence[tuple[R, str]]) -> R | None:
    """Return the row of a name; None without one."""
    found = {package: row for row, package in rows if row.name == name}
    if len(found) > 1:
        raise CkptError(name, f"is a {kind} of {' and of '.join(sorted(found))}", "uninstall all but one of them")
    return next(iter(found.values()), None)


def call(code: str, path: str, *arguments: Any) -> Any:
    """Call a function of a row; an error in the code of another package names the package.

    Args:
        code: Address of the function.
        path: The checkpoint, or the argument.
        arguments: Its arguments.

    Raises:
        CkptError: It raises one, or the code of another package raises any error.
    """
    if code.startswith(f"{__package__}."):
        return imported(code)(*arguments)
    with naming(code, path):
        return imported(code)(*arguments)


@contextlib.contextmanager
def naming(code: str, path: str, *passing: type[BaseException]) -> Iterator[None]:
    """Context manager: an error in the code of another package, other than of ckpttool, names the package.

    Args:
        code: Address of the code.
        path: The command, the checkpoint or the argument.
        passing: Further classes of errors that are raised as they are.

    Raises:
        CkptError: For any other error.
    """
    raised_as_they_are: tuple[type[BaseException], ...] = (CkptError, *passing)
    try:
        yield
    except raised_as_they_are:
        raise
    except (Exception, SystemExit) as error:
        package = next((other.package for other in others() if other.has(code)), code.partition(".")[0])
        problem = f"fails in the extension {package}: {type(error).__name__}: {printable(str(error), 300)}"
        raise CkptError(path, problem, "update or uninstall that package") from error
