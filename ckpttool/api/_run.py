"""One run of a command that writes: open its sources, check the destination, write a plan, report the output."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.blocks import Line, Table
from ckpttool.errors import ArgumentError, LayoutError, StorageError
from ckpttool.execution.destination import Destination, RunOptions
from ckpttool.execution.run import nbytes_read
from ckpttool.formats import Source, open_checkpoint, source_paths
from ckpttool.formats.layouts import Place
from ckpttool.storage import is_url, local_path, without_credentials
from ckpttool.storage.staging import KEPT
from ckpttool.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from ckpttool.api.options import Options
    from ckpttool.blocks import Block
    from ckpttool.execution.checks import ReadReport
    from ckpttool.execution.destination import Needs
    from ckpttool.execution.distributed import Workers
    from ckpttool.formats.sidecars import SidecarFile
    from ckpttool.model import Checkpoint, State
    from ckpttool.plan import CopyPlan
    from ckpttool.targets.weight_files import WeightChoice


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file of the output."""

    name: str
    """File name."""
    nbytes: int
    """Size in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The output of a command, written or planned by a dry run."""

    out: str
    """The output directory."""
    dry_run: bool = False
    """True if nothing was written."""
    there: bool = False
    """Whether ``out`` held the whole output already, byte for byte: nothing was written."""
    files: tuple[WrittenFile, ...]
    """Files of the output."""
    nbytes_read: int
    """Bytes of tensors read."""
    nbytes_written: int
    """Bytes of all files."""
    overflowed: int = 0
    """Finite values that became infinite in the type of the output."""
    seconds: float
    """Wall time."""
    digest: str | None = None
    """With ``prove``, the digest of the weights, equal for source and output."""
    checks: ReadReport | None = None
    """Comparisons with recorded checksums; None if nothing was written, and for ``check="off"``."""
    needs: Needs | None = None
    """For a dry run, the disk space and memory of the run."""
    kept: tuple[str, ...] = ()
    """With ``overwrite``, new names of files in ``out`` that sidecar files have replaced, and that differ from them."""

    def line(self, contents: str) -> Line:
        """Return the line with the output, the duration, and the bytes written and read."""
        verb = "would write" if self.dry_run else "wrote"
        if self.there:
            verb = "was there already, nothing was written:"
        took = "" if self.dry_run else f" in {self.seconds:.1f} s"
        return Line(
            f"{self.out}: {verb} {contents}, {format_size(self.nbytes_written)}{took} "
            f"(read {format_size(self.nbytes_read)})"
        )

    def remarks(self, notes: Sequence[str]) -> Iterator[Block]:
        """Yield the digest, the notes, the comparisons with checksums; for a dry run, the needed space and memory."""
        if self.digest is not None:
            yield Line(f"{self.digest} (source and output match)", color="green")
        for note in notes:
            yield Line(f"note: {note}", color="yellow")
        for name in self.kept:
            yield Line(f"note: the file of OUT that differed is kept as {name}", color="yellow")
        if self.checks is not None:
            yield from self.checks.blocks()
        if (needs := self.needs) is not None:
            free = "" if needs.free_bytes is None else f"; {format_size(needs.free_bytes)} are free where OUT is"
            yield Line(f"needs: about {format_size(needs.memory_bytes)} of memory{free}")

    def weights(self, tied: Mapping[str, str], notes: Sequence[str], dtype: str | None) -> Iterator[Block]:
        """Yield the files, the tied names, the notes and the comparisons of written weights."""
        yield Table(["file", "size"], [(f.name, format_size(f.nbytes)) for f in self.files], right=["size"])
        for alias, name in tied.items():
            yield Line(f"{alias} is tied to {name}: stored once")
        yield from self.remarks(notes)
        if self.overflowed:
            yield Line(
                f"warning: {self.overflowed:,} values are too large for {dtype} and became infinite; use bf16 or fp32",
                color="yellow",
            )


@dataclass(frozen=True, slots=True)
class RunSource:
    """The source of a run: the checkpoint to write, and the files beside it."""

    checkpoint: Checkpoint
    """The weights and everything else."""
    companions: tuple[SidecarFile, ...] | None = None
    """Sidecar files; None for the checkpoint's own."""
    notes: tuple[str, ...] = ()
    """Remarks for the user."""


class Addition:
    """The options of an extension in a run: they may change its checks, its workers and its source."""

    def check(self, chosen: WeightChoice) -> None:
        """Refuse values that no checkpoint allows, before any file is opened.

        Raises:
            ArgumentError: There is one.
        """

    def workers(self, destination: Destination) -> AbstractContextManager[Workers] | None:
        """Return the processes that do the work of the run; None if this process does it.

        Raises:
            CkptError: There are none, or they cannot write to the destination.
        """
        return None

    def source(self, run: Run, source: RunSource) -> RunSource:
        """Return what to write instead of the opened source.

        Raises:
            CkptError: The options do not fit the source.
        """
        return source


class Run:
    """One run of a command.

    Args:
        destination: The output: a path or URL, or an open destination.
        options: The options that all commands share.
        additions: What the options of extensions add.

    Raises:
        CkptError: The destination cannot be written in the way that the options ask for.
    """

    def __init__(self, destination: str | Destination, options: Options, additions: Sequence[Addition] = ()) -> None:
        self._began = time.perf_counter()
        self.options = options
        if isinstance(destination, str):
            destination = Destination(destination, options.opening.storage_options)
        self.destination = destination
        if options.prove and options.overwrite and destination.remote:
            # A proof reads the output, and a store shows no upload before it replaces the old file.
            problem = "compares the output only after an overwrite on a remote storage has replaced the old files"
            hint = "write to another directory with prove and remove the old one, or leave out prove"
            raise ArgumentError("prove", problem, hint, ("prove",))
        self._workers = _workers_of(additions, destination)

    def open(self, sources: Sequence[Source]) -> list[Checkpoint]:
        """Open the sources, and check that the destination can be written and is not one of them.

        Args:
            sources: Each as for ``open_checkpoint``.

        Raises:
            CkptError: The destination cannot or must not be written, or a source is not a sound checkpoint.
        """
        openings = []
        for src in sources:
            paths = source_paths(src)
            opened = partial(self.options.open, paths)
            # Concurrent round trips to several stores take as long as one.
            concurrent = is_url(paths[0]) and (self.destination.remote or len(sources) > 1)
            openings.append(_in_background(opened) if concurrent else opened)
        for src in sources:
            self.destination.check_other(source_paths(src))
        if not self.options.resume:
            self.destination.check_target(overwrite=self.options.overwrite)
        checkpoints = [_with_origin(opened(), src) for opened, src in zip(openings, sources, strict=True)]
        for checkpoint in checkpoints:
            if checkpoint.unproven and not self.options.allow_partial:
                hint = "if no file is missing, pass allow_partial=True"
                raise LayoutError(checkpoint.location, checkpoint.unproven, hint, ("allow_partial",))
            self.destination.check_apart(checkpoint)
        if self.options.overwrite and Place(self.destination.storage, self.destination.out).holds_checkpoint:
            problem = "contains a checkpoint, with which the output would be mixed"
            raise StorageError(self.destination.out, problem, "choose another OUT")
        return checkpoints

    def write(
        self,
        plan: CopyPlan,
        checkpoint: Checkpoint,
        *,
        last: Sequence[str],
        selected: Mapping[str, tuple[State, str]] | None = None,
        verify: Callable[[str], str | None] | None = None,
        may_be_there: bool | None = None,
    ) -> Written:
        """Write the files of a plan and commit them; or only report the files, if this is a dry run.

        Args:
            plan: The plan.
            checkpoint: The checkpoint that it reads.
            last: Names of the files to commit last, in this order.
            selected: The state of each tensor of the source that is written, and its type there, by name; None if all
                states are.
            verify: Called with the written directory before the commit; returns the digest, and raises if the output is
                wrong. Default: if the options ask for a proof, compares the output with the source.
            may_be_there: Whether an earlier run may have written the whole output; default: if the options resume.

        Raises:
            CkptError: A source is damaged, the output is wrong, or the destination cannot or must not be written.
        """
        options, destination = self.options, self.destination
        if options.prove and verify is None:
            verify = partial(self._prove, checkpoint, selected)
        checks = options.read_checks(plan.sources, checkpoint)
        run_options = RunOptions(options.jobs, options.memory_bytes, options.progress, checks, self._workers)
        there, overflowed, needs = False, 0, None
        digest: str | None = None
        if options.resume if may_be_there is None else may_be_there:
            there = not options.dry_run and destination.holds_output(plan, run_options)
            if not there:
                destination.check_target(overwrite=options.overwrite)
        before = destination.names() if options.overwrite else set()
        if options.dry_run:
            needs = destination.forecast(plan, run_options)
        elif there:
            digest = None if verify is None else verify(destination.out)
        else:
            overflowed, digest = destination.write(
                plan, run_options, last=last, verify=verify, overwrite=options.overwrite, resume=options.resume
            )
        kept = {n for n in destination.names() - before if KEPT in n} if options.overwrite else ()
        return Written(
            out=destination.out,
            dry_run=options.dry_run,
            there=there,
            files=tuple(WrittenFile(f.name, f.nbytes) for f in plan.files),
            nbytes_read=nbytes_read(plan, to_disk=not destination.remote, workers=self._workers),
            nbytes_written=plan.nbytes_written,
            overflowed=overflowed,
            seconds=time.perf_counter() - self._began,
            digest=digest,
            checks=None if options.dry_run or there or checks is None else checks.report,
            needs=needs,
            kept=tuple(sorted(kept)),
        )

    def _prove(self, checkpoint: Checkpoint, selected: Mapping[str, tuple[State, str]] | None, directory: str) -> str:
        """Compare a written output with its source; return the digest of the weights.

        Raises:
            CkptError: The output cannot be read, or differs.
        """
        from ckpttool.analysis.digest import same_digest, same_weights

        output = open_checkpoint(directory, opening=self.options.opening, unfinished=True)
        if selected is None:
            return same_digest(checkpoint, output, directory, self.options.jobs)
        return same_weights(checkpoint, selected, output, self.options.jobs)


def _in_background(function: Callable[[], Checkpoint]) -> Callable[[], Checkpoint]:
    """Start a function in its own thread; the returned function waits for its result.

    Callers may leave without waiting: the thread is a daemon and ends with the process.
    """
    from concurrent.futures import Future

    future: Future[Checkpoint] = Future()

    def set_result() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=set_result, name="ckpttool-open", daemon=True).start()
    return future.result


def _workers_of(additions: Sequence[Addition], destination: Destination) -> AbstractContextManager[Workers] | None:
    return next((found for one in additions if (found := one.workers(destination)) is not None), None)


def _with_origin(checkpoint: Checkpoint, src: Source) -> Checkpoint:
    """Add a remark that names the checkpoint, if the source is a directory above its root, such as a run's."""
    paths = source_paths(src)
    given = without_credentials(local_path(paths[0])).rstrip("/")
    if len(paths) > 1 or given in {"", "."} or not checkpoint.root.startswith(f"{given}/"):
        return checkpoint
    return replace(checkpoint, remarks=(f"read from {checkpoint.location}", *checkpoint.remarks))
