"""Shared start of the commands that write: open the source, check the destination, choose the workers."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.errors import ArgumentError
from ckpttool.formats import Source, source_paths
from ckpttool.storage import is_url

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from ckpttool.api.options import Options
    from ckpttool.execution.distributed import Workers
    from ckpttool.execution.output.destination import Destination
    from ckpttool.execution.run import RunOptions
    from ckpttool.model import Checkpoint
    from ckpttool.plan import CopyPlan

NO_SUCH_NAME = ("holds no tensor of that name", "check include and exclude", ("include", "exclude"))
"""Problem, next step and parameters where globs match no tensor."""


def open_for(destination: Destination, src: Source, options: Options) -> Checkpoint:
    """Open the source of a command that writes, and check that its destination can be written.

    Args:
        destination: Where the command writes.
        src: As for ``open_checkpoint``.
        options: The command's options; ``overwrite`` as for ``Destination.check_target``.

    Raises:
        CkptError: The destination cannot or must not be written, or there is no sound checkpoint.
    """
    return open_each(destination, [src], options)[0]


def open_each(destination: Destination, sources: Sequence[Source], options: Options) -> list[Checkpoint]:
    """Open several checkpoints; arguments and errors as for ``open_for``."""
    openings = []
    for src in sources:
        paths = source_paths(src)
        opened = partial(options.open, paths)
        # Round trips to several stores together take as long as one.
        concurrent = is_url(paths[0]) and (destination.remote or len(sources) > 1)
        openings.append(_in_background(opened) if concurrent else opened)
    if not options.resume:
        destination.check_target(overwrite=options.overwrite)
    checkpoints = [opened() for opened in openings]
    for checkpoint in checkpoints:
        destination.check_apart(checkpoint)
    return checkpoints


def is_done(destination: Destination, plan: CopyPlan, work: RunOptions, options: Options) -> bool:
    """Return whether an earlier run has written the whole output that is to be resumed.

    Args:
        destination: Where the command writes.
        plan: What it writes.
        work: How it would run the plan.
        options: The command's options.

    Raises:
        CkptError: It has not, and the destination cannot or must not be written; or a source is damaged.
    """
    if not options.resume:
        return False
    if not options.dry_run and destination.holds_output(plan, work):
        return True
    destination.check_target(overwrite=options.overwrite)
    return False


def check_prove(destination: Destination, options: Options) -> None:
    """Refuse to prove an output that replaces files which could not be put back.

    A proof reads the output, and a store shows no upload before it is completed in the place of the old file.

    Raises:
        ArgumentError: ``prove`` and ``overwrite`` are set, and the destination is remote.
    """
    if options.prove and options.overwrite and destination.remote:
        problem = "compares what was written, when an overwrite on a remote storage has replaced the old files already"
        hint = "write to another directory with prove and remove the old one, or leave out prove"
        raise ArgumentError("prove", problem, hint, ("prove",))


def _in_background(function: Callable[[], Checkpoint]) -> Callable[[], Checkpoint]:
    """Start a function in its own thread; the returned function waits for its result.

    Callers may leave without waiting: the thread is a daemon and ends with the process.
    """
    from concurrent.futures import Future

    future: Future[Checkpoint] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="ckpttool-open", daemon=True).start()
    return future.result


def workers_for(ray: bool | str | None, destination: Destination) -> AbstractContextManager[Workers] | None:
    """The Ray cluster that runs the tasks; None if this process does the work.

    Raises:
        CkptError: Ray is not installed, its address is malformed, or several processes cannot write to the destination.
    """
    if ray is None or ray is False:
        return None
    from ckpttool.integrations.ray.cluster import RayCluster

    destination.check_shareable()
    return RayCluster("" if ray is True else ray)
