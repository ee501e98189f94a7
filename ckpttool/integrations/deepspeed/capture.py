"""Capture the files that a live engine would save through DeepSpeed's checkpoint engine, without writing them.

Source: DeepSpeed 0.19.8, runtime/engine.py (``save_checkpoint``) and runtime/checkpoint_engine/checkpoint_engine.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import posixpath
import shutil
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from ckpttool.commit.marks import identity
from ckpttool.errors import PlanError
from ckpttool.integrations.deepspeed.engine import replaced_parameters
from ckpttool.integrations.live.files import CapturedFiles, hint_of, unpicklable
from ckpttool.integrations.torch.pickling import describe
from ckpttool.saving.files import ArchiveFile, HostPayload, PlainFile
from ckpttool.storage import LOCAL, MARK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpttool.integrations.live.host_memory import HostMemory
    from ckpttool.saving.files import OutgoingFile, Payload


LOG = logging.getLogger(__name__)
SCRATCH = ".ckpttool-scratch-"
"""Prefix of a scratch directory for swap files copied by DeepSpeed."""


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The content of a file of the model, by the names of the module."""

    module: frozenset[str]
    """Names in the module's state dict; at stage 3 the values of parameters are elsewhere."""
    partitioned: frozenset[str]
    """Parameters whose values the ranks have in parts."""
    quantised: frozenset[str]
    """Frozen parameters that are quantised to 8 bit."""
    config: Mapping[str, Any]
    """DeepSpeed's configuration."""


def _model_in(content: Any) -> SavedModel | None:
    """Return the description of a file of the model; None for another file.

    Source: DeepSpeed 0.19.8, runtime/engine.py (``_common_checkpoint_state``, ``_save_checkpoint``).
    """
    if not isinstance(content, dict) or "ds_config" not in content or "module" not in content:
        return None
    fragments = content.get("frozen_param_fragments") or {}
    shapes = content.get("param_shapes") or []
    module, config = content["module"], content["ds_config"]
    return SavedModel(
        module=frozenset(module if isinstance(module, dict) else ()),
        partitioned=frozenset([*(name for group in shapes for name in group), *fragments]),
        quantised=frozenset(name for name, value in fragments.items() if str(value.dtype) == "torch.int8"),
        config=config if isinstance(config, dict) else {},
    )


def _tells_slices(content: Any) -> bool:
    """Return whether a file describes how tensor parallelism slices parameters."""
    inner = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    return any(isinstance(one, dict) and bool(one.get("universal_checkpoint_info")) for one in (content, inner))


@dataclass(slots=True)
class EngineFiles(CapturedFiles):
    """The files of one engine that this rank writes."""

    memory: list[tuple[int, Payload]] = field(default_factory=list)
    """Address of each captured storage, and the payload that holds its bytes until ``release``."""
    model: SavedModel | None = None
    """The file of the model; None if this rank writes none."""
    tells_slices: bool = False
    """Whether a file describes how tensor parallelism slices parameters."""

    def release(self) -> None:
        """Release the files, the scratch directory and the copies in host memory."""
        CapturedFiles.release(self)
        self.memory.clear()


class _CapturingEngine(CheckpointEngine):  # type: ignore[misc]  # DeepSpeed is not followed
    """Checkpoint engine that collects the files DeepSpeed saves.

    Args:
        own: The engine's own checkpoint engine, which decides which rank writes which file.
        directory: The directory of the tag, as DeepSpeed sees it.
        memory: Host memory to copy tensors to at once; None to refer to the tensors in place.
    """

    def __init__(self, own: Any, directory: str, memory: HostMemory | None) -> None:
        super().__init__()
        self.name = "ckpttool"
        self._own = own
        self._directory = directory
        self._memory = memory
        self.captured = EngineFiles()

    def create(self, info: Any) -> None:
        """Do nothing."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: the writer creates directories."""

    def save(self, state_dict: Any, path: str) -> None:
        """Collect a file."""
        if self.captured.failed is not None:
            return
        name = posixpath.relpath(path, self._directory)
        try:
            pickled = describe(state_dict)
        except Exception as error:
            # Not raised here: the other ranks would wait for this one forever.
            problem = f"cannot be pickled: {type(error).__name__}: {error}"
            self.captured.failed = PlanError(name, problem, hint_of(name, unpicklable(state_dict)))
            return
        self.captured.model = self.captured.model or _model_in(state_dict)
        self.captured.tells_slices |= _tells_slices(state_dict)
        storages = pickled.storages
        payloads = storages if self._memory is None else self._memory.hold(storages)
        self.captured.files.append(ArchiveFile(name, pickled.structure, payloads))
        self.captured.memory += [(storage.address, payloads[key]) for key, storage in storages.items()]

    def load(self, path: str, map_location: Any = None) -> Any:
        """Not supported: a save loads nothing."""
        raise NotImplementedError

    def commit(self, info: Any) -> bool:
        """Do nothing: the two-phase protocol commits after all ranks have written."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return whether this rank writes, as decided by the engine's own checkpoint engine."""
        return bool(self._own.is_data_parallel_writer(dp_rank))

    def preserves_storage_sharing(self) -> bool:
        """Return False: only used parts of large buffers are written, so that DeepSpeed need not copy views."""
        return False


@contextlib.contextmanager
def _checkpoint_engine_replaced(engine: Any, replacement: Any) -> Iterator[None]:
    original = engine.checkpoint_engine
    engine.checkpoint_engine = replacement
    try:
        yield
    finally:
        engine.checkpoint_engine = original


@contextlib.contextmanager
def _persistent_parameters_restored(optimizer: Any) -> Iterator[None]:
    """Restore the persistent parameters of a ZeRO-3 engine after a save, instead of gathering each again.

    A save frees all gathered parameters, and then gathers each parameter that is kept gathered between steps (biases,
    norms) by its own collective: the train loop waits for all. A save changes no parameter.

    Source: DeepSpeed 0.19.8, runtime/zero/stage3.py (``checkpoint_event_epilogue``) and partition_parameters.py
    (``free_param``).
    """
    persistent = getattr(optimizer, "persistent_parameters", None)
    # All ranks take the same decision: gathering is collective.
    if not persistent or any(p.ds_status.name != "AVAILABLE" for p in persistent):
        yield
        return
    saved = [(parameter, parameter.data, parameter.ds_status) for parameter in persistent]
    epilogue = optimizer.checkpoint_event_epilogue

    def restore() -> None:
        optimizer.persistent_parameters = []  # so that it gathers none
        try:
            epilogue()
        finally:
            optimizer.persistent_parameters = persistent
        for parameter, data, status in saved:
            parameter.data, parameter.ds_status = data, status

    optimizer.checkpoint_event_epilogue = restore
    try:
        yield
    finally:
        del optimizer.checkpoint_event_epilogue


def capture(
    engine: Any,
    *,
    tag: str,
    client_state: Mapping[str, Any],
    memory: HostMemory | None,
    exclude_frozen: bool,
    scratch_root: str | None,
    own_files: Mapping[str, Any] | None = None,
    name: str = "",
) -> EngineFiles:
    """Collect the files that this rank would save, without writing them; call it on every rank.

    Args:
        engine: ``deepspeed.DeepSpeedEngine`` or ``PipelineEngine``.
        tag: The checkpoint's name.
        client_state: The train loop's own state.
        memory: Host memory to copy tensors to; None to refer to the tensors in place until the files are written.
        exclude_frozen: Leave frozen parameters out.
        scratch_root: A directory on the checkpoints' disk, for swap files that DeepSpeed copies from NVMe; None for
            the system's temporary directory.
        own_files: Content of files of this rank beside DeepSpeed's, by name.
        name: Name of one of several engines, whose files are in a subdirectory; "" for an engine alone.
    """
    nvme = bool(engine.zero_nvme_offload_optimizer())
    if nvme and scratch_root is not None:
        os.makedirs(scratch_root, exist_ok=True)
    scratch = tempfile.mkdtemp(prefix=SCRATCH, dir=scratch_root if nvme else None)
    if nvme and scratch_root is not None:  # by the marker a later run knows it as left by this one
        LOCAL.put(os.path.join(scratch, MARK), json.dumps({"key": "", "files": [], **identity()}).encode())
    directory = os.path.join(scratch, tag)
    if memory is not None:
        memory.begin()
    capturing = _CapturingEngine(engine.checkpoint_engine, directory, memory)
    captured = capturing.captured
    captured.scratch = [scratch]
    try:
        os.makedirs(os.path.join(directory, name))
        with _checkpoint_engine_replaced(engine, capturing), _persistent_parameters_restored(engine.optimizer):
            engine.save_checkpoint(
                scratch,
                tag=posixpath.join(tag, name) if name else tag,
                client_state=dict(client_state),
                save_latest=False,
                exclude_frozen_parameters=exclude_frozen,
            )
            for own, content in (own_files or {}).items():
                capturing.save(content, posixpath.join(directory, name, own))
        if memory is not None:
            memory.settle()
    except BaseException as error:
        if memory is not None:
            with contextlib.suppress(RuntimeError):  # the device itself may have failed
                memory.settle()
        captured.release()
        if not isinstance(error, Exception):
            raise
        LOG.exception("DeepSpeed could not save")
        problem, hint = f"DeepSpeed could not save: {type(error).__name__}: {error}", "see the log of that rank"
        if (strays := replaced_parameters(engine.optimizer)) and isinstance(error, KeyError):
            problem = f"DeepSpeed could not save: {strays}"
            hint = "choose an optimizer that makes its states in its first step, or ZeRO stage 1 to 3"
        captured.failed = PlanError(tag, problem, hint)  # the other ranks raise it, too
        return captured
    for entry in os.scandir(scratch):
        if entry.is_file() and entry.name != MARK:
            with open(entry.path, "rb") as file:
                captured.root_files[entry.name] = file.read()
    captured.files += _swap_files(directory)
    if not nvme:
        captured.scratch = []
        shutil.rmtree(scratch, ignore_errors=True)
    return captured


def _swap_files(directory: str) -> Iterator[OutgoingFile]:
    """Yield the files that DeepSpeed itself copied: states offloaded to NVMe."""
    for above, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(above, name)
            with open(path, "rb") as file:
                data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if os.path.getsize(path) else b""
            yield PlainFile(posixpath.relpath(path, directory), HostPayload(memoryview(data)))
