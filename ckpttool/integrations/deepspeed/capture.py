"""What a live engine would save, taken through DeepSpeed's own seam for that: nothing is written here.

Source: DeepSpeed 0.19.8, runtime/engine.py (``save_checkpoint``) and runtime/checkpoint_engine/checkpoint_engine.py.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import posixpath
import shutil
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from ckpttool.catalog.cleanup import SCRATCH
from ckpttool.containers.torch_file import MAX_PICKLE_BYTES
from ckpttool.containers.unpickler import Truncated, unpickle
from ckpttool.errors import CkptError, ContainerError, PlanError
from ckpttool.integrations.deepspeed.engine import look
from ckpttool.integrations.torch.objects import unknown_classes
from ckpttool.integrations.torch.pickling import describe
from ckpttool.saving.payloads import Held, PlainFile, TorchFile

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ckpttool.integrations.deepspeed.host_memory import HostMemory
    from ckpttool.saving.payloads import OutgoingFile


LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Collected:
    """The files that this rank is to write."""

    files: list[OutgoingFile] = field(default_factory=list)
    """Into the directory of the tag."""
    beside: dict[str, bytes] = field(default_factory=dict)
    """Into the root: DeepSpeed's scripts."""
    failed: CkptError | None = None
    """Why they are not all."""
    scratch: str = ""
    """Holds some of them."""
    unknown: tuple[str, ...] = ()
    """Classes of their objects that a restore builds only with ``allow``."""

    def prove(self, allow: Collection[str] = ()) -> None:
        """Read the pickles back, as a restore will; records a failure instead of raising it.

        Args:
            allow: Classes that a restore is told to build.
        """
        for file in self.files if self.failed is None else ():
            if not isinstance(file, TorchFile):
                continue
            try:
                found = unpickle(file.pickled, path=file.name)
            except (ContainerError, Truncated) as error:
                problem = getattr(error, "problem", "its pickle ends too early")
                self.failed = PlanError(file.name, f"could not be read again: {problem}", "see what client_state holds")
                return
            self.unknown = (*self.unknown, *unknown_classes(found.value, allow))
            odd = [
                k
                for k, ref in found.storages.items()
                if k not in file.payloads or file.payloads[k].nbytes != ref.nbytes
            ]
            if odd or len(file.pickled) > MAX_PICKLE_BYTES:
                problem = (
                    f"storage {odd[0]} has another size than its tensors say" if odd else "its pickle is too large"
                )
                self.failed = PlanError(file.name, f"could not be read again: {problem}", "see what client_state holds")
                return

    def release(self) -> None:
        """Forget them."""
        self.files.clear()
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)


class _Collector(CheckpointEngine):  # type: ignore[misc]  # DeepSpeed is not followed
    """Notes what DeepSpeed would write.

    Args:
        own: The engine's own, which says who writes what.
        directory: What DeepSpeed takes for the directory of the tag.
        memory: Where to copy tensors to at once; None to refer to them where they are.
    """

    def __init__(self, own: Any, directory: str, memory: HostMemory | None) -> None:
        super().__init__()
        self.name = "ckpttool"
        self._own = own
        self._directory = directory
        self._memory = memory
        self.found = Collected()

    def create(self, info: Any) -> None:
        """Nothing is to be begun."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Directories are made by who writes."""

    def save(self, state_dict: Any, path: str) -> None:
        """Note a file."""
        if self.found.failed is not None:
            return
        name = posixpath.relpath(path, self._directory)
        try:
            pickled = describe(state_dict)
        except Exception as error:
            # Not raised here, where the other ranks would wait for this one for ever.
            problem = f"cannot be pickled: {type(error).__name__}: {error}"
            self.found.failed = PlanError(name, problem, "see what client_state holds")
            return
        storages = pickled.storages
        held = storages if self._memory is None else self._memory.hold(storages)
        self.found.files.append(TorchFile(name, pickled.structure, held))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Is not asked for in a save."""
        raise NotImplementedError

    def commit(self, info: Any) -> bool:
        """Is done when all ranks have written."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """As the engine's own says, which has told the engine so before."""
        return bool(self._own.is_data_parallel_writer(dp_rank))

    def preserves_storage_sharing(self) -> bool:
        """False: DeepSpeed need not copy views of large buffers, of which only the parts in use are written."""
        return False


@contextlib.contextmanager
def _swapped(engine: Any, other: Any) -> Iterator[None]:
    own = engine.checkpoint_engine
    engine.checkpoint_engine = other
    try:
        yield
    finally:
        engine.checkpoint_engine = own


@contextlib.contextmanager
def _persistent_kept(optimizer: Any) -> Iterator[None]:
    """Give a ZeRO-3 engine its persistent parameters back as they were, instead of gathering each anew after a save.

    A save frees all gathered parameters, and ends with one collective for each of those that stay gathered between
    steps (biases, norms): many short waits, in which the train loop stands still. A save changes no parameter.

    Source: DeepSpeed 0.19.8, runtime/zero/stage3.py (``checkpoint_event_epilogue``) and partition_parameters.py
    (``free_param``).
    """
    persistent = getattr(optimizer, "persistent_parameters", None)
    # The same on all ranks, for gathering is collective.
    if not persistent or any(p.ds_status.name != "AVAILABLE" for p in persistent):
        yield
        return
    kept = [(parameter, parameter.data, parameter.ds_status) for parameter in persistent]
    epilogue = optimizer.checkpoint_event_epilogue

    def put_back() -> None:
        optimizer.persistent_parameters = []  # of what it gathers
        try:
            epilogue()
        finally:
            optimizer.persistent_parameters = persistent
        for parameter, data, status in kept:
            parameter.data, parameter.ds_status = data, status

    optimizer.checkpoint_event_epilogue = put_back
    try:
        yield
    finally:
        del optimizer.checkpoint_event_epilogue


def check_engine(engine: Any) -> None:
    """Make sure that it is DeepSpeed's.

    Raises:
        PlanError: It is not.
    """
    if not hasattr(engine, "checkpoint_engine") or not hasattr(engine, "save_checkpoint"):
        problem = f"is a {type(engine).__name__}, not a DeepSpeed engine"
        raise PlanError("engine", problem, "pass what deepspeed.initialize returned")


def groups_without_zero(engine: Any) -> list[list[str]]:
    """The parameters of each group of the optimizer, in its order, where no file will name them; else none."""
    if engine.optimizer is None or engine.zero_optimization() or not hasattr(engine.optimizer, "param_groups"):
        return []
    live = look(engine)
    return [] if live.stage or live.model is None else [list(names) for names in live.model.groups]


def collect(
    engine: Any, *, tag: str, client_state: Mapping[str, Any], memory: HostMemory | None, exclude_frozen: bool,
    scratch_root: str | None,
) -> Collected:  # fmt: skip
    """What this rank would save, on every rank; no file of it is written.

    Args:
        engine: ``deepspeed.DeepSpeedEngine`` or its pipeline's.
        tag: The checkpoint's name.
        client_state: What the train loop saves along.
        memory: Where to copy tensors to; None to refer to them where they are, until the files are written.
        exclude_frozen: Leave frozen parameters out.
        scratch_root: A directory on the disk of the checkpoints, for what DeepSpeed itself copies from NVMe; None for
            the system's.
    """
    nvme = bool(engine.zero_nvme_offload_optimizer())
    if nvme and scratch_root is not None:
        os.makedirs(scratch_root, exist_ok=True)
    scratch = tempfile.mkdtemp(prefix=SCRATCH, dir=scratch_root if nvme else None)
    directory = os.path.join(scratch, tag)
    if memory is not None:
        memory.begin()
    collector = _Collector(engine.checkpoint_engine, directory, memory)
    found = collector.found
    found.scratch = scratch
    try:
        os.makedirs(directory)
        with _swapped(engine, collector), _persistent_kept(engine.optimizer):
            engine.save_checkpoint(
                scratch, tag=tag, client_state=dict(client_state), save_latest=False,
                exclude_frozen_parameters=exclude_frozen,
            )  # fmt: skip
        if memory is not None:
            memory.settle()
    except BaseException as error:
        if memory is not None:
            with contextlib.suppress(RuntimeError):  # the device itself may be what failed
                memory.settle()
        found.release()
        if not isinstance(error, Exception):
            raise
        LOG.exception("DeepSpeed could not save")
        problem = f"DeepSpeed could not save: {type(error).__name__}: {error}"
        found.failed = PlanError(tag, problem, "see the log of that rank")  # the other ranks raise it, too
        return found
    for entry in os.scandir(scratch):
        if entry.is_file():
            with open(entry.path, "rb") as file:
                found.beside[entry.name] = file.read()
    found.files += _copied(directory)
    if not nvme:
        found.scratch = ""
        shutil.rmtree(scratch, ignore_errors=True)
    return found


def _copied(directory: str) -> Iterator[OutgoingFile]:
    """What DeepSpeed has copied by itself: states that lie on NVMe."""
    for above, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(above, name)
            with open(path, "rb") as file:
                data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if os.path.getsize(path) else b""
            yield PlainFile(posixpath.relpath(path, directory), Held(memoryview(data)))
