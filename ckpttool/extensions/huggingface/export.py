"""Write the weights of committed checkpoints as Hugging Face folders, in a background thread of the first rank."""

from __future__ import annotations

import logging
import os
import posixpath
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.errors import CkptError, PlanError
from ckpttool.execution.checks import checks_for
from ckpttool.execution.destination import Destination, RunOptions
from ckpttool.execution.run import memory_bytes
from ckpttool.formats import Opening, open_checkpoint
from ckpttool.storage import LOCAL
from ckpttool.storage.system_calls import replace_files
from ckpttool.targets.weight_files import WeightChoice, plan_weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LOG = logging.getLogger(__name__)
Dtype = Literal["fp32", "bf16", "fp16"]
SCRATCH = ".ckpttool-export"
"""Directory in a checkpoint's folder for weights that are not complete yet."""


def export(
    folder: str,
    out: str | None,
    *,
    dtype: Dtype,
    adapter_only: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Write the weights of a checkpoint as safetensors files.

    Args:
        folder: Folder of the checkpoint.
        out: Directory or URL to write; None for the folder itself, on local disk.
        dtype: Type of the weights.
        adapter_only: Write a PEFT adapter.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.

    Returns:
        The directory with the weights.

    Raises:
        CkptError: The checkpoint is damaged, or the weights cannot be written.
    """
    began = time.perf_counter()
    target = out or os.path.join(folder, SCRATCH)
    destination = Destination(target, storage_options)
    destination.check_target(overwrite=True)
    checkpoint = open_checkpoint(folder, opening=Opening(storage_options))
    chosen = WeightChoice("safetensors", dtype, adapter_only=adapter_only)
    made = plan_weight_files(checkpoint, chosen, destination.out)
    options = RunOptions(1, memory_bytes(None), None, checks_for(made.plan.sources, checkpoint, "read"), None)
    destination.write(made.plan, options, last=(made.index,), overwrite=True, resume=None)
    LOG.info("exported %s to %s in %.1f s", folder, out or folder, time.perf_counter() - began)
    if out is not None:
        return out
    move_weights(target, folder)
    return folder


def move_weights(source: str, target: str) -> None:
    """Move the weights of an export into another local folder, which has its own configuration; the index last."""
    names = [n for n in os.listdir(source) if ".safetensors" in n]
    replace_files(source, target, sorted(names, key=lambda name: name.endswith(".json")))
    LOCAL.remove_tree(source)


class Exporter:
    """Exports checkpoints one after another in a thread.

    Args:
        dtype: Type of the weights.
        adapter_only: Whether to export a PEFT adapter.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
    """

    def __init__(
        self, dtype: Dtype, *, adapter_only: bool = False, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._dtype: Dtype = dtype
        self._adapter_only = adapter_only
        self._storage_options = storage_options
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ckpttool-export")
        self._running: dict[str, Future[CkptError | None]] = {}

    @property
    def busy(self) -> set[str]:
        """Names of the folders that are being exported, or wait for it."""
        return {posixpath.basename(folder) for folder, future in self._running.items() if not future.done()}

    def start(self, folder: str, out: str | None, then: Callable[[str], None] | None = None) -> None:
        """Export a checkpoint in the background.

        Args:
            folder: Folder of the checkpoint.
            out: Directory or URL to write; None for the folder itself.
            then: Called in the thread with the directory of the weights.
        """

        def logged_export() -> CkptError | None:
            try:
                done = export(
                    folder,
                    out,
                    dtype=self._dtype,
                    adapter_only=self._adapter_only,
                    storage_options=self._storage_options,
                )
                if then is not None:
                    then(done)
            except CkptError as error:
                LOG.error("the weights of %s were not exported: %s", folder, error)  # noqa: TRY400
                return error
            except Exception as error:
                LOG.exception("the weights of %s were not exported", folder)
                return PlanError(folder, f"was not exported: {type(error).__name__}: {error}", "see the log")
            return None

        self._running[folder] = self._pool.submit(logged_export)

    def wait(self) -> None:
        """Wait until all exports have ended.

        Raises:
            CkptError: One failed.
        """
        running, self._running = self._running, {}
        failed = [error for error in (future.result() for future in running.values()) if error is not None]
        if failed:
            raise failed[0]
