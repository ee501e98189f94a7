"""Load any checkpoint into a live run, on any number of ranks, with no conversion in between.

Every rank reads only its own state. A load has two halves. The first half reads, and may fail; then the ranks agree
that all reads succeeded; the second half changes the run. A damaged file therefore never leaves a run half loaded, and
no rank waits for a failed rank. With ``staged=False`` the first half reads no data, and the second half may fail.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.errors import ArgumentError
from ckpttool.formats import Opening, open_checkpoint, source_paths, source_storage
from ckpttool.integrations.live.choice import run_of
from ckpttool.integrations.live.options import LoadOptions
from ckpttool.integrations.torch.collectives import open_together, ranks_of_process_group
from ckpttool.registry import values_of, with_options
from ckpttool.saving.coordination import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ckpttool.execution.checks import Check
    from ckpttool.formats import Source
    from ckpttool.integrations.live.report import LoadReport
    from ckpttool.storage import Storage


@with_options
def load(  # noqa: PLR0913  public API
    engine: Any,
    src: Source,
    *,
    tag: str | None = None,
    strict: bool = True,
    weights_only: bool = False,
    optimizer: Any = True,
    scheduler: Any = True,
    extra: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    staged: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
    memory: int | str | None = None,
    check: Check = "read",
    trust_names: bool = False,
    allow: Collection[str] = (),
    timeout: float = TIMEOUT,
    **given: Any,
) -> LoadReport:
    """Load any checkpoint into a live run of DeepSpeed or torch, on any number of ranks and at any ZeRO stage.

    Call it on every rank, like ``engine.load_checkpoint``. If ranks, stage and parameters match the save, DeepSpeed
    gets the content of its own files; otherwise each rank reads its ranges from the files of all ranks. Unlike
    ``engine.load_checkpoint`` it runs no pickle: ckpttool parses the files and builds the objects in them.

    A torch model may be plain, or under DDP, FSDP2, HSDP or tensor parallelism. Its parameters, buffers and optimizer
    states are filled in place, in the types that the run has. No step is taken, no hook is called, and gradients are
    dropped.

    Args:
        engine: The engine that ``deepspeed.initialize`` returned, or a torch model, or several torch models by name.
        strict: Whether checkpoint and engine must have the same parameters and buffers. If not, missing ones keep the
            engine's values, and unexpected ones are left out; the report names both.
        weights_only: Load weights, fp32 master weights and buffers from any source, and leave the optimizer's states,
            the counters and the scheduler unchanged. The report has the client state.
        optimizer: Of a torch model, its optimizer, or several in a list or by the names of their models. Of an engine,
            whether to restore the optimizer's states and hyper-parameters. False: only weights, fp32 master weights,
            buffers, counters and the scheduler are restored.
        scheduler: Of a torch model, its learning-rate scheduler, or several by name. Of an engine, whether to restore
            it.
        extra: Of a torch model, the other objects that were saved, by name; a GradScaler also gets the loss scale of
            DeepSpeed.
        dry_run: Report the result of a load, without reading weights or changing the run.
        staged: Whether to read the new state into host memory beside the run's, so that a failed load leaves the run
            unchanged. False: read it straight into the run, without a second copy. Names, shapes, types and options are
            compared before; an error after that says that the run is half loaded.
        memory: Bytes of requests in flight on each rank, for a remote source: a number, or "256MB" (default). Also a
            limit of the buffer of ``staged=False``, which has at most 16 MB.
        check: Recorded CRC-32 to compare with the bytes of all ranks, before the engine changes: of records read
            "read" whole, "full" also of partly read ones, "off" none. With a manifest, every byte is compared with its
            checksums.
        allow: Classes ("module.Class") of objects in the client state to build, which runs their code. Plain data,
            tensors, numpy arrays, paths and dates are always built.
        timeout: Seconds that a rank may lag.

    Returns:
        A report of the restored state; its ``client_state`` is the state saved by the user's code.

    Raises:
        CkptError: The checkpoint is damaged or does not fit the engine, or an argument is wrong; on every rank.
    """
    opening = Opening(storage_options, follow_links)
    options = LoadOptions(
        strict=strict,
        weights_only=weights_only,
        optimizer=optimizer,
        scheduler=scheduler,
        dry_run=dry_run,
        staged=staged,
        memory=memory,
        check=check,
        allow=tuple(allow),
        given=values_of("load", given),
    )
    began = time.perf_counter()
    ranks = ranks_of_process_group("load", timeout)
    name = _named(src)
    run = run_of(engine, optimizer, scheduler, extra=extra)
    asked = {"tag": tag, "src": name} | options.agreed() | run.kind

    def begin() -> tuple[list[str], Storage]:
        _ = options.memory_bytes  # raises for a text that is not a size
        paths = source_paths(src)
        if [*run.objects] != [""]:
            raise ArgumentError("engine", "is a mapping of several engines", "load each engine by itself")
        run.check(options)
        return paths, source_storage(paths, opening)

    paths, storage = ranks.together(name, begin, asked)
    read = partial(open_checkpoint, paths, tag=tag, storage=storage, trust_names=trust_names, module_only=weights_only)
    checkpoint = open_together(paths[0], storage, read, ranks)
    (report,) = run.restore([checkpoint], options, ranks)
    ranks.finish()
    return replace(report, seconds=time.perf_counter() - began)


def _named(src: Source) -> str:
    """Return the name of a source in errors."""
    try:
        return ", ".join(source_paths(src))
    except (TypeError, ValueError):
        return repr(src)[:200]
