"""Workers that run tasks as other machines would."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from ckpttool.execution.distributed import run_task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.execution.distributed import Task, TaskContext, TaskResult


class PickledTasks:
    """Runs each task from its pickled form alone."""

    def __enter__(self) -> PickledTasks:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, context: TaskContext, tasks: Iterator[Task]) -> Iterator[TaskResult]:
        """Run one task after another."""
        for task in tasks:
            yield run_task(*pickle.loads(pickle.dumps((context, task))))
