"""How commands that write begin: what they are to read is opened, and what they are to write is looked at."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ckpttool.formats import Source, open_checkpoint, source_paths
from ckpttool.storage import is_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpttool.execution.output.destination import Destination
    from ckpttool.model import Checkpoint


def open_for(
    destination: Destination,
    src: Source,
    *,
    tag: str | None,
    overwrite: bool | None,
    options: Mapping[str, Any] | None,
    trust_names: bool = False,
) -> Checkpoint:
    """Open a checkpoint that is to be written elsewhere, if that can be.

    Args:
        destination: Where to.
        src: As for ``open_checkpoint``.
        tag: As for ``open_checkpoint``.
        overwrite: As for ``Destination.check_target``.
        options: What to tell the storage's fsspec class.
        trust_names: As for ``open_checkpoint``.

    Raises:
        CkptError: The destination cannot or must not be written, or there is no sound checkpoint.
    """
    paths = source_paths(src)

    def opened() -> Checkpoint:
        return open_checkpoint(paths, tag=tag, options=options, trust_names=trust_names)

    if destination.distant and is_url(paths[0]):  # both are round trips, which one after the other would add up
        opened = _begun(opened)
    destination.check_target(overwrite=overwrite)
    checkpoint = opened()
    destination.check_apart(checkpoint)
    return checkpoint


def _begun(function: Callable[[], Checkpoint]) -> Callable[[], Checkpoint]:
    """Begin with something in a thread of its own; returns what waits for it and gives what came of it.

    Nobody has to wait: the thread ends with the process.
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
