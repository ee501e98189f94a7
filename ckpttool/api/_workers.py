"""Who does the work of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ckpttool.execution.distributed import Workers
    from ckpttool.execution.output.destination import Destination


def workers_for(ray: bool | str | None, destination: Destination) -> AbstractContextManager[Workers] | None:
    """Who does the work; None for this process.

    Raises:
        CkptError: Ray is not installed, the address is none, or several processes cannot write to the destination.
    """
    if ray is None or ray is False:
        return None
    from ckpttool.integrations.ray.cluster import RayCluster

    destination.check_shareable()
    return RayCluster("" if ray is True else ray)
