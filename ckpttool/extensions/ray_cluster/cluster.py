"""Run tasks on a Ray cluster: each task is a Ray task.

Source: Ray 2.60, ray/_private/worker.py (``init``, ``wait``, ``cancel``) and services.py (how it finds a cluster).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import re
import secrets
import signal
import socket
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

from ckpttool._version import __version__
from ckpttool.api._run import Addition
from ckpttool.errors import ArgumentError, CkptError, PlanError, StorageError
from ckpttool.execution import distributed
from ckpttool.messages import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from types import TracebackType

    from ckpttool.execution.destination import Destination
    from ckpttool.execution.distributed import Task, TaskContext, TaskResult

RETRIES = 5
"""Retries of a task whose node or process was lost; Ray does not count preempted nodes."""
TASKS_PER_CPU = 2
"""One running task, and one queued, so that no CPU is idle."""
PROBE_SECONDS = 5.0
"""Seconds to wait for a connection to an address; Ray itself waits 15 minutes."""
POLL_SECONDS = 2.0
"""Seconds between two counts of the cluster's CPUs."""
CANCEL_SECONDS = 10.0
"""Seconds to wait for cancelled processes to end."""
_ADDRESS = re.compile(r"|auto|local|[^\s/]+:\d+|[A-Za-z][A-Za-z0-9+.-]*://\S+")
_HOST_AND_PORT = re.compile(r"(?:ray://)?\[?([^\s/\]]+)\]?:(\d+)/?")


class OnCluster(Addition):
    """The work of a run on a Ray cluster.

    Args:
        ray: Address of the cluster; True for the one that Ray finds or starts, False for none.
    """

    def __init__(self, ray: bool | str) -> None:
        self._ray = ray

    def workers(self, destination: Destination) -> RayCluster | None:
        """Return the cluster.

        Raises:
            CkptError: Ray is not installed, its address is malformed, or several processes cannot write the output.
        """
        if self._ray is False:
            return None
        destination.check_shareable()
        return RayCluster("" if self._ray is True else self._ray)


class RayCluster:
    """Context manager of a Ray cluster: join it, or start one that ends with the block.

    A cluster that this process joined before is used, and not left.

    Args:
        address: As ``ray.init`` takes it: "host:port", "ray://host:port", "auto", "local"; "" for RAY_ADDRESS, or a
            cluster that runs on this machine; otherwise it starts one on this machine.

    Raises:
        PlanError: Ray is not installed, or the address is invalid.
    """

    def __init__(self, address: str = "") -> None:
        if importlib.util.find_spec("ray") is None:
            raise PlanError("ray", "is not installed", "pip install 'ckpttool[ray]'")
        if not _ADDRESS.fullmatch(address):
            hint = "write HOST:PORT, or auto"
            raise ArgumentError("ray", f"is {brief(address)}, not the address of a Ray cluster", hint, ("ray",))
        self._address = address
        self._joined = False
        self._was_silent = False
        self._task_limit = 1
        self._capacity_read_at = 0.0

    def __enter__(self) -> RayCluster:
        import ray

        if not ray.is_initialized():
            self._join()
        elif not self._is_joined_to():
            problem = "is not the Ray cluster that this process already joined"
            raise PlanError(self._address, problem, "call ray.shutdown() first, or leave the address out")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._joined:
            import ray

            ray.shutdown()
            _silence_events(self._was_silent)
            self._joined = False

    # ------------------------------------------------------------------------------------------------- joining

    def _join(self) -> None:
        """Join the cluster.

        Raises:
            PlanError: No cluster answers at the address, or it cannot be joined.
        """
        import ray

        address = self._address
        if address in {"", "auto"}:
            address = os.environ.get("RAY_ADDRESS", "") or address
        if address in {"", "auto"}:
            found = _local_cluster_address(address)
            # A killed cluster leaves its address on disk.
            if found and not _answers(found):
                if address:
                    raise PlanError(address, f"the Ray cluster at {found} does not answer", "start it again")
                address = "local"
        elif not _answers(address):
            raise PlanError(address, "no Ray cluster answers there", "check the address, and that its head node runs")
        options: dict[str, Any] = {} if "://" in address else {"include_dashboard": False}
        handler = signal.getsignal(signal.SIGTERM)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ray.init(address=address or None, log_to_driver=False, logging_level="error", **options)
        except Exception as error:
            message = (str(error).strip().splitlines() or [type(error).__name__])[0]
            hint = "check the address, and that Ray and Python are of the same release there"
            raise PlanError(address or "ray", f"cannot be joined: {message}", hint) from error
        finally:
            # Ray's handler of SIGTERM would leave half-written output.
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)
        self._joined = True
        self._was_silent = _silence_events(True)

    def _is_joined_to(self) -> bool:
        import ray

        if self._address in {"", "auto"}:
            return True
        requested = _HOST_AND_PORT.fullmatch(self._address)
        joined = _HOST_AND_PORT.fullmatch(str(ray.get_runtime_context().gcs_address))
        if requested is None or joined is None or requested[2] != joined[2]:
            return False
        try:
            host = socket.gethostbyname(requested[1])
            return host == socket.gethostbyname(joined[1]) or host.startswith("127.")
        except OSError:
            return False

    # ------------------------------------------------------------------------------------------------- working

    def run(self, context: TaskContext, tasks: Iterator[Task]) -> Generator[TaskResult, None, None]:
        """Run tasks, as many at once as the cluster has room for; yield results in the order of completion.

        After the generator is closed or raises, no task is running.

        Raises:
            CkptError: A task failed, or lost its process too often; or a node has another release.
        """
        import ray

        # In a list, each process fetches it once, instead of once per task.
        context_refs = [ray.put(_pickled(context))]
        arguments = (__version__, _own_node(), secrets.token_hex(8), context_refs)
        remote = ray.remote(num_cpus=1, max_retries=RETRIES, scheduling_strategy="SPREAD")(_task_function())
        running: dict[Any, Task] = {}
        try:
            for task in tasks:
                while len(running) >= self._capacity():
                    yield from self._finished(running)
                running[remote.remote(*arguments, _pickled(task))] = task
            while running:
                yield from self._finished(running)
        finally:
            _cancel(list(running))

    def _capacity(self) -> int:
        """Number of tasks to submit at once; grows when nodes join."""
        import ray

        if time.monotonic() - self._capacity_read_at > POLL_SECONDS:
            self._task_limit = max(1, int(ray.cluster_resources().get("CPU", 1))) * TASKS_PER_CPU
            self._capacity_read_at = time.monotonic()
        return self._task_limit

    def _finished(self, running: dict[Any, Task]) -> Iterator[TaskResult]:
        import ray

        ready, _ = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
        for ref in ready:
            yield _result_of(ref, running.pop(ref))


def _local_cluster_address(address: str) -> str:
    """Return the address of the cluster that Ray would find; "" if there is none."""
    try:
        from ray._private.services import canonicalize_bootstrap_address

        return canonicalize_bootstrap_address(address or None) or ""
    except (ImportError, AttributeError, TypeError, ValueError, OSError):
        return ""  # ray.init then raises its own error


def _silence_events(quiet: bool) -> bool:
    """Set whether Ray prints events of lost nodes and processes on stdout; return the previous setting.

    Ray retries their tasks: the events would only disturb the results on stdout.
    """
    try:
        worker: Any = importlib.import_module("ray._private.worker")
        before = not worker._worker_logs_enabled
        worker._worker_logs_enabled = not quiet
    except (ImportError, AttributeError):
        return False
    return before


def _answers(address: str) -> bool:
    """Whether a server listens at an address; True for addresses that only Ray can resolve."""
    match = _HOST_AND_PORT.fullmatch(address)
    if match is None:
        return True
    try:
        socket.create_connection((match[1], int(match[2])), timeout=PROBE_SECONDS).close()
    except (OSError, OverflowError):
        return False
    return True


def _own_node() -> str:
    """Return the node of this process; "" outside the cluster."""
    import ray

    return "" if ray.util.client.ray.is_connected() else str(ray.get_runtime_context().get_node_id())


def _pickled(value: TaskContext | Task) -> bytes:
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except CkptError:
        raise
    except Exception as error:
        problem = f"cannot be sent to other processes ({type(error).__name__})"
        raise PlanError("storage_options", problem, "leave out ray", ("ray",)) from error


def _result_of(ref: Any, task: Task) -> TaskResult:
    """Return the result of a task.

    Raises:
        CkptError: The task failed.
    """
    import ray

    try:
        outcome = ray.get(ref)
    except ray.exceptions.RayTaskError:
        raise  # a bug of ckpttool: with its traceback
    except ray.exceptions.RayError as error:
        problem = f"was not written: Ray gave up after {RETRIES} retries ({type(error).__name__})"
        raise StorageError(task.name, problem, "see Ray's logs; each task needs its own memory", ("memory",)) from error
    if isinstance(outcome, str):
        raise PlanError("ray", outcome, f"install ckpttool {__version__} on every node")
    if isinstance(outcome, CkptError):
        raise outcome
    result: TaskResult = outcome
    return result


def _cancel(refs: Sequence[Any]) -> None:
    """Cancel all tasks, before their output is removed.

    Kill their processes: Ray would reuse a process that was interrupted anywhere, even during an import.
    """
    if not refs:
        return
    import ray

    for ref in refs:
        with contextlib.suppress(Exception):  # the task or its node has ended
            ray.cancel(ref, force=True)
    with contextlib.suppress(Exception):
        ray.wait(list(refs), num_returns=len(refs), timeout=CANCEL_SECONDS, fetch_local=False)


# ------------------------------------------------------------------------------------------------ on the nodes


def _task_function() -> Callable[..., Any]:
    """Return the function that Ray runs; it is sent as code, so that it can report a node without this package."""

    def ckpttool_task(version: str, planning_node: str, run: str, context_refs: list[Any], task: bytes) -> Any:
        import socket

        node = socket.gethostname()
        try:
            from ckpttool._version import __version__
            from ckpttool.extensions.ray_cluster.cluster import run_in_worker
        except ImportError as error:
            return f"cannot import ckpttool on node {node} ({error})"
        if __version__ != version:
            return f"has ckpttool {__version__} on node {node}, and {version} here"
        return run_in_worker(planning_node, run, context_refs, task)

    return ckpttool_task


_CONTEXTS: dict[str, TaskContext] = {}
"""The context of the tasks of the last run, by the run's random id, so that tasks reuse connections to stores."""


def run_in_worker(planning_node: str, run: str, context_refs: list[Any], task: bytes) -> TaskResult | CkptError:
    """Run a task in a Ray worker process.

    Args:
        planning_node: The node that made the plan; see ``_own_node``.
        run: Random id of the run.
        context_refs: Holds the reference to the context of its tasks.
        task: The task, pickled.

    Returns:
        The result. An error is returned, not raised: Ray would add the text of its cause.
    """
    import ray

    if run not in _CONTEXTS:
        _CONTEXTS.clear()
        _CONTEXTS[run] = pickle.loads(ray.get(context_refs[0]))
    node = "" if ray.get_runtime_context().get_node_id() == planning_node else socket.gethostname()
    try:
        return distributed.run_task(_CONTEXTS[run], pickle.loads(task), node=node)
    except CkptError as error:
        return error
