"""Changes to the objects of a training framework: replaced attributes, scratch directories, compared signatures."""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
from typing import TYPE_CHECKING, Any

from ckpttool.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a function that writes or reads a part of a checkpoint."""


@contextlib.contextmanager
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object, which hide its class's; restore them at the end of the block."""
    before = {name: target.__dict__[name] for name in values if name in target.__dict__}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(target, name, before[name])
            else:
                delattr(target, name)


def scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """Create a scratch directory; as a context manager it gives the path, and removes the directory at its end."""
    return tempfile.TemporaryDirectory(prefix="ckpttool-", ignore_cleanup_errors=True)


def make_folder(directory: str, name: str) -> str:
    """Create a folder in a scratch directory; return its path."""
    path = os.path.join(directory, name)
    os.makedirs(path)
    return path


def write_file(directory: str, name: str, data: bytes | memoryview) -> None:
    """Write a file of a scratch directory.

    Args:
        directory: The scratch directory.
        name: Relative path of the file, without "..".
        data: Its content.
    """
    path = os.path.join(directory, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def remove_files(directory: str, matches: Callable[[str], bool]) -> None:
    """Remove the files of a scratch directory whose name matches."""
    for above, _, names in os.walk(directory):
        for name in filter(matches, names):
            os.unlink(os.path.join(above, name))


def check_signatures(
    owner: Any, expected: Mapping[str, Sequence[str]], *, release: str, known: str, overrides: bool = False
) -> None:
    """Check that a class or module has functions with the expected parameters.

    Args:
        owner: The class or module.
        expected: Parameters of each function, by name: the first ones.
        release: Name and version of the installed framework, for messages.
        known: Name and version of a release that has these functions, for messages.
        overrides: ckpttool's own functions with these parameters take the places of the framework's, which then may
            have fewer parameters, but no others.

    Raises:
        PlanError: A function is missing, or has other parameters.
    """
    for name, parameters in expected.items():
        function = getattr(owner, name, None)
        full = f"{owner.__name__}.{name}"
        if function is None:
            raise PlanError(release, f"has no {full}, which ckpttool needs", f"use {known}")
        found = list(inspect.signature(function).parameters)
        count = len(found) if overrides else len(parameters)
        if found[:count] != list(parameters)[:count]:
            problem = f"has another {full} than ckpttool knows: {', '.join(found)}"
            raise PlanError(release, problem, f"use {known}")
