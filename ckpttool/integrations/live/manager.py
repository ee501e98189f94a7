"""``CheckpointManager``: save, restore and remove the checkpoints of one root."""

from __future__ import annotations

import contextlib
import logging
import posixpath
import time
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ckpttool.arguments import check_choice, checked_path
from ckpttool.catalog.cleanup import maintain
from ckpttool.catalog.restore_order import find
from ckpttool.catalog.retention import GRACE, Rules, format_best
from ckpttool.commit import is_commit
from ckpttool.commit.manifest import read_manifest
from ckpttool.commit.marks import state_of
from ckpttool.errors import CkptError, LayoutError, LinkError, PlanError, StorageError
from ckpttool.formats import Opening, open_whole
from ckpttool.formats.layouts import Place
from ckpttool.formats.locate import NoCheckpointError, SeveralModelsError
from ckpttool.formats.sidecars import is_rank_state
from ckpttool.integrations.live.choice import run_of
from ckpttool.integrations.live.options import LoadOptions
from ckpttool.integrations.live.report import SaveReport
from ckpttool.integrations.live.request import HINTS, Save, check_known, note_known
from ckpttool.integrations.live.run import Kept, half_loaded, thin_error
from ckpttool.integrations.signals import SignalWatch
from ckpttool.messages import brief
from ckpttool.registry import carry_out, hooks, values_of, with_options
from ckpttool.saving import two_phase
from ckpttool.saving.background import Background
from ckpttool.saving.claim import Skipped, mark_skipped
from ckpttool.saving.coordination import TIMEOUT, RankError
from ckpttool.saving.provenance import begin as begin_provenance
from ckpttool.storage import LOCAL, is_url, local_path, open_storage, without_credentials
from ckpttool.storage.confined import confined
from ckpttool.targets.dcp import LAYOUTS

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Unpack

    from ckpttool import _CheckpointManagerOptions, _CheckpointManagerRestoreOptions
    from ckpttool.integrations.live.report import LoadReport
    from ckpttool.integrations.live.request import KnownEngines
    from ckpttool.integrations.live.run import Captured, Ready, Run
    from ckpttool.model import Checkpoint
    from ckpttool.saving.coordination import Ranks
    from ckpttool.saving.two_phase import ManifestRecord, Request
    from ckpttool.storage import Storage, WritableStorage

    Opener = Callable[[Storage, str], Checkpoint]


LOG = logging.getLogger(__name__)
MEETING = "manager"
"""Purpose of the ranks' agreement: a manager joins with its first save or restore, not in its constructor."""


@with_options
class CheckpointManager:
    """Saves and restores the state of a DeepSpeed engine; make one on every rank, with the same arguments.

    A save is a plain DeepSpeed checkpoint, committed as a whole or not at all; DeepSpeed can load it without ckpttool.

    As a context manager it calls ``wait`` at the end of the block, and restores the handlers of ``signals``.

    Args:
        root: Directory or URL of all checkpoints of the run; every rank must reach it.
        keep_last: Number of newest checkpoints to keep. Without any rule all are kept.
        keep_every: Keep checkpoints whose step is a multiple of this.
        keep_best: ("eval_loss", "min", 2): keep the two with the smallest of that metric; "max" for the largest.
        keep_for: Keep checkpoints younger than this: seconds, or a text like "7d".
        layout: Names of the entries in saves of torch runs, for loaders without ckpttool: "nested" for torch's
            ``get_state_dict``, "flat" with a flat optimizer, "app" of Ray's template, "accelerate", "torchtitan"
            or "lightning".
        async_save: Return after the state is copied to host memory, and write in the background.
        timeout: Seconds that a rank may lag before a save fails.
        grace: Seconds after which files of a killed save are removed, counted from the newest of them.
        on_save: Called on every rank after each save, in the thread of the save.
        signals: Signals that announce the end of the run (``signal.SIGTERM`` on most clusters); see ``preempted``.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.
            For ``restore``.
        allow: Classes ("module.Class") of objects in the client state that ``restore`` builds, which runs their code.
        provenance: Whether manifests record the git revision and the checkpoint that the run was restored from.
        storage: Storage of the root, if the caller has it open; default: opened by the URL of the root.

    Raises:
        ArgumentError: A rule is malformed, or signals cannot be watched: only in the main thread.
    """

    def __init__(  # noqa: PLR0913  public API
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, str, int] | None = None,
        keep_for: float | str | None = None,
        layout: str = "nested",
        async_save: bool = False,
        timeout: float = TIMEOUT,
        grace: float = GRACE,
        on_save: Callable[[SaveReport], None] | None = None,
        signals: Sequence[int] = (),
        storage_options: Mapping[str, Any] | None = None,
        follow_links: bool = False,
        allow: Collection[str] = (),
        provenance: bool = True,
        storage: WritableStorage | None = None,
        **given: Unpack[_CheckpointManagerOptions],
    ) -> None:
        try:
            path = checked_path("root", root)
            self.root = without_credentials(local_path(path)).rstrip("/") or path
            if not is_url(self.root):
                self.root = posixpath.abspath(self.root)  # the train loop may change the working directory
            opening = Opening(storage_options, follow_links)
            self._storage = storage or open_storage(path, opening.storage_options)
            self.source = confined(self._storage, self.root, follow_links=opening.follow_links)
            """The storage that ``restore`` reads from."""
            best = None if keep_best is None else format_best(keep_best)
            (action,) = carry_out("CheckpointManager", given) or (None,)
            rules = (keep_last, keep_every, best, keep_for, action)
            self._rules = None if all(rule is None for rule in rules) else Rules(*rules)
            check_choice("layout", layout, tuple(LAYOUTS))
            self._signals = SignalWatch(signals)
        except Exception:
            _skip_meeting()
            raise
        self._allow = tuple(sorted(allow))
        self._provenance = provenance
        if provenance:
            begin_provenance()
        self._timeout = timeout
        self._grace = grace
        self._on_save = on_save
        self._kept = Kept(self.root if self._storage is LOCAL else None, async_save, layout)
        self._background = Background()
        self._group: Any = None
        self._saved: KnownEngines = {}
        self._skipped: dict[str, Skipped] = {}
        self._parent: tuple[str, str] | None = None
        self.committed: tuple[str, int] | None = None
        """Attempt and number of the last commit of this manager."""
        self.restored: LoadReport | None = None
        """Report of the last ``restore``."""
        self.restored_path = ""
        """Path or URL of that checkpoint."""

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.restore()
        if kind is None:
            self.wait()
            return
        try:
            self.wait()
        except CkptError as failed:
            LOG.error("%s", failed)  # noqa: TRY400  the exception that ends the block has the traceback

    def save(  # noqa: PLR0913  public API
        self,
        engine: Any,
        *,
        optimizer: Any = True,
        scheduler: Any = True,
        extra: Mapping[str, Any] | None = None,
        step: int | None = None,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
        exclude_frozen_parameters: bool = False,
        save_latest: bool = True,
        rank_state: Any = None,
    ) -> SaveReport | None:
        """Save the state of a run of DeepSpeed or torch, on every rank at the same step.

        Args:
            engine: The engine that ``deepspeed.initialize`` returned; or several by name, such as {"policy": a,
                "critic": b}, which are saved as one checkpoint, each in a subdirectory of its name. The same in each
                call. Or a torch model: plain, or under DDP, FSDP2, HSDP or tensor parallelism; or several by name,
                whose parameters are saved with the names in front.
            optimizer: Of a torch model, its optimizer, or several in a list or by the names of their models; an engine
                has its own.
            scheduler: Of a torch model, its learning-rate scheduler, or several by name; an engine has its own.
            extra: Of a torch model, other objects with ``state_dict`` and ``load_state_dict`` by name, such as
                {"scaler": scaler}. A state that differs between ranks is of each rank, and restored on as many ranks.
            step: Of a torch model, the steps of the run; an engine counts them.
            tag: The checkpoint's name. Default: DeepSpeed's, "global_step" and the number of steps; of a torch model
                "step-" and the number. If it differs between ranks, the save fails; with ``tag_validation`` "Warn" or
                "Ignore" in DeepSpeed's configuration the first rank's counts.
            client_state: State to save with the checkpoint; ``restore`` returns it.
            metrics: Numbers for ``keep_best``; the manifest gets the first rank's.
            overwrite: Replace a checkpoint of that name, unless it is pinned. One that ``restore`` has skipped as torn
                or damaged is moved to ``TAG.damaged`` in any case.
            exclude_frozen_parameters: Leave them out, as ``engine.save_checkpoint`` does.
            save_latest: Name the checkpoint in ``latest``, as ``engine.save_checkpoint`` does.
            rank_state: This rank's own state, in a file of its own; on every rank or on none. Of the same types as
                ``client_state``. ``restored.rank_state`` and ``restored.rank_states`` return it after a restore.

        Returns:
            The report; None with ``async_save``: ``on_save`` gets it.

        Raises:
            CkptError: This save failed, or the previous one in the background; names the rank. Nothing was committed.
        """
        self.wait()
        arguments = Save(
            tag=tag,
            client_state={} if client_state is None else client_state,
            metrics={} if metrics is None else metrics,
            overwrite=overwrite,
            exclude_frozen=exclude_frozen_parameters,
            save_latest=save_latest,
            rank_state=rank_state,
        )
        return self.save_into(self.root, run_of(engine, optimizer, scheduler, step, extra), arguments, self._saved)

    def save_into(self, root: str, run: Run, save: Save, known: KnownEngines | None = None) -> SaveReport | None:
        """Like ``save``, but into another root; call ``wait`` first. Other frameworks have one root per checkpoint.

        Args:
            root: A root on the manager's storage.
            run: The run.
            save: The other arguments of ``save``.
            known: The engines of the run, which gets these.
        """
        began, ranks = time.perf_counter(), self._ranks
        asked = run.asked(save) | {"root": root, "async_save": self.saves_in_background, "layout": self._kept.layout}
        what = root if asked["tag"] is None else posixpath.join(root, str(asked["tag"]))
        ready, tag = ranks.begin(
            what,
            asked,
            own=partial(self._ready, run, save, known),
            decide=lambda ready: ready.request.tag,
            hints=HINTS,
        )
        if ready.request.tag != tag and asked["tag_validation"] == "WARN":
            LOG.warning("rank %d has tag %s: the save uses rank 0's, %s", ranks.rank, ready.request.tag, tag)
        request = replace(
            ready.request,
            tag=tag,
            skipped=self._skipped.get(posixpath.join(root, tag)),
            parent=self._parent_in(root),
        )
        ready = ready._replace(request=request)
        captured = run.capture(ready, save, ranks, self._kept, posixpath.join(root, tag))
        waits = not self.saves_in_background
        records = [hook(captured, save, ranks, waits=waits) for hook in hooks("after_capture")]
        note_known(run.objects, known)
        write = partial(self._write, root, request, captured, records, began)
        if waits:
            report = write()
            if report.error is not None:
                raise report.error
            return report
        stall = time.perf_counter() - began
        try:
            self._background.start(lambda: write(stall).error)
        except RuntimeError as error:
            captured.files.release()
            problem = f"was not saved: the program is ending ({error})"
            raise PlanError(posixpath.join(root, tag), problem, "save before its end") from error
        return None

    def _ready(self, run: Run, save: Save, known: KnownEngines | None) -> Ready:
        """Check that this rank can begin a save, and describe its run."""
        if self._rules is not None and self._rules.action is not None:
            self._rules.action.refuse_several(run.several)
        ready = run.ready(save, self._ranks, provenance=self._provenance)
        check_known(run.objects, known)
        return ready

    @property
    def saves_in_background(self) -> bool:
        """Whether ``save`` returns before the checkpoint is committed."""
        return self._kept.in_background

    @saves_in_background.setter
    def saves_in_background(self, value: bool) -> None:
        self._kept.in_background = value

    @property
    def saving(self) -> bool:
        """Whether a background save of this rank is running."""
        return self._background.running

    def wait(self) -> None:
        """Wait until the save in the background is committed.

        Raises:
            CkptError: It failed.
        """
        self._background.wait()

    @with_options
    def restore(  # noqa: PLR0913  public API
        self,
        engine: Any,
        *,
        tag: str | None = None,
        strict: bool = True,
        weights_only: bool = False,
        optimizer: Any = True,
        scheduler: Any = True,
        extra: Mapping[str, Any] | None = None,
        dry_run: bool = False,
        require_committed: bool = False,
        staged: bool = True,
        **given: Unpack[_CheckpointManagerRestoreOptions],
    ) -> dict[str, Any] | None:
        """Load the newest whole checkpoint into the run, on every rank; ranks, stage and mesh may have changed.

        Incomplete and damaged checkpoints are skipped, with a warning in the log. For checkpoints saved by this class,
        all bytes read are compared with the checksums; unless ``staged=False``, before the engine changes.

        Args:
            engine: The engine that ``deepspeed.initialize`` returned, or a torch model; or several by the names they
                were saved with.
            tag: Load only this checkpoint.
            strict: Whether checkpoint and engine must have the same parameters and buffers. If not, missing ones keep
                the engine's values, and unexpected ones are left out; the report names both.
            weights_only: Load weights, fp32 master weights and buffers from any source, and leave the optimizer's
                states, the counters and the scheduler unchanged. The report has the client state.
            optimizer: Of a torch model, its optimizer, or several in a list or by the names of their models. Of an
                engine, whether to restore the optimizer's states and hyper-parameters. Without them, the engine gets
                weights, fp32 master weights, buffers, counters and the scheduler.
            scheduler: Of a torch model, its learning-rate scheduler, or several by name. Of an engine, whether to
                restore it.
            extra: Of a torch model, the other objects that were saved, by name; a GradScaler also gets the loss scale
                of DeepSpeed.
            dry_run: Report the result of a load, without reading weights or changing the engine. ``restored`` gets the
                report of the planned restore.
            require_committed: Fail if the newest checkpoint has no manifest, like DeepSpeed's own saves.
            staged: Whether to read the new state into host memory beside the run's; see ``ckpttool.load``. With False,
                a damaged checkpoint leaves the run half loaded; the next older one then overwrites all of it.

        Returns:
            The client state of the checkpoint; None without a checkpoint. ``restored`` has the report; of several
            engines, the report of the first.

        Raises:
            CkptError: There are checkpoints, but no restore succeeded; the same on every rank.
        """
        options = LoadOptions(
            strict=strict,
            weights_only=weights_only,
            optimizer=optimizer,
            scheduler=scheduler,
            dry_run=dry_run,
            staged=staged,
            allow=self._allow,
            committed=require_committed,
            given=values_of("CheckpointManager.restore", given),
        )
        self.wait()
        run = run_of(engine, optimizer, scheduler, extra=extra)
        found = self.begin_restore(
            run, lambda: [one.path for one in find(self.source, self.root, tag)], options, root=self.root, tag=tag
        )
        return self.restore_first(found, run, options, fall_back=tag is None)

    def begin_restore(
        self,
        run: Run,
        search: Callable[[], list[str]],
        options: LoadOptions,
        known: KnownEngines | None = None,
        **asked: Any,
    ) -> list[str]:
        """Search for checkpoints on the first rank, when all ranks are ready to restore with the same arguments.

        Args:
            run: The run.
            search: Returns the paths of the checkpoints, best first.
            options: The options.
            known: The engines of the run; None to allow any.
            **asked: Other arguments that must be the same on all ranks.
        """
        asked |= {"engines": [*run.objects]} | options.agreed()
        ready = partial(self._check_restored, run, options, known)
        _, found = self._ranks.begin(self.root, asked, own=ready, decide=lambda _: search())
        return found

    def _check_restored(self, run: Run, options: LoadOptions, known: KnownEngines | None) -> None:
        """Check that this rank can restore."""
        run.check(options)
        check_known(run.objects, known)

    def restore_first(
        self,
        found: Sequence[str],
        run: Run,
        options: LoadOptions,
        *,
        fall_back: bool,
    ) -> dict[str, Any] | None:
        """Restore the first of some checkpoints; with ``fall_back``, the next one if it is damaged.

        ``restored_path`` gets its path. Of several engines, all get the same checkpoint.
        """
        from ckpttool.integrations.torch.collectives import open_together

        self.restored = None
        wanted = () if options.weights_only else tuple(run.objects)
        ranks, storage = self._ranks, self.source
        open_ = partial(open_whole, committed=options.committed, module_only=options.weights_only)
        first: CkptError | None = None
        thin = half = False
        for path in found:
            try:
                opened = [
                    open_together(path, storage, partial(_open_engine, open_, storage, path, name, wanted), ranks)
                    for name in run.objects
                ]
                if opened[0].thin and fall_back and not options.without_optimizer:
                    first, thin = first or thin_error(opened[0]), True
                    continue  # an older one may be whole
                # After half a load, all of the run must be overwritten: it has no values of its own to keep.
                reports = run.restore(opened, replace(options, strict=options.strict or half), ranks)
            except (PlanError, LinkError, RankError) as error:
                # It is sound but does not fit, or the user must decide: an older one does not help.
                if not half:
                    raise
                raise half_loaded(error, path) from error
            except CkptError as error:
                if not (fall_back and error.falls_back):
                    raise
                half = half or error.half_loaded
                if ranks.rank == 0:  # the other ranks have the same error
                    self.skip(path, error)
                first = first or error
                continue
            self._note_restored(path, reports, options)
            ranks.finish()
            return dict(reports[0].client_state)
        if first is not None:
            failed = _none_restorable(self.root, len(found), first, thin=thin)
            raise half_loaded(failed, self.root) if half else failed
        return None

    def _note_restored(self, path: str, reports: Sequence[LoadReport], options: LoadOptions) -> None:
        # The first engine of the save has the states of the ranks.
        of_ranks = next((one for one in reports if one.rank_states), reports[0])
        self.restored = replace(reports[0], rank_state=of_ranks.rank_state, rank_states=of_ranks.rank_states)
        self.restored_path = path
        if self._ranks.rank == 0 and not options.dry_run:
            LOG.info("%s", "; ".join(map(str, reports)))
            with contextlib.suppress(CkptError):
                self._parent = _attempt_of(self.source, path), Place(self.source, self.root).newest

    def skip(self, path: str, error: CkptError) -> None:
        """Note a checkpoint that a restore passes over, on the first rank.

        The next save marks it, so that no rotation counts it; the save of its step moves it aside.
        """
        LOG.warning("%s cannot be restored, trying the one before it: %s", path, error)
        with contextlib.suppress(CkptError):
            if not isinstance(error, StorageError):  # which may pass
                self._skipped[path] = Skipped(state_of(self.source, path), error.problem)

    def _parent_in(self, root: str) -> tuple[str, str] | None:
        """Return ``Request.parent`` if the restored checkpoint is in a root, else None."""
        return self._parent if self.restored_path.startswith(f"{root.rstrip('/')}/") else None

    def preempted(self, *, reset: bool = False) -> bool:
        """Return whether a signal has announced the end of the run on any rank; call it on every rank, once a step.

        If so, save, wait, and leave the loop. Signals are also passed to the handlers set before the manager.

        Args:
            reset: Forget the signal, to continue training. The same on every rank.
        """
        from ckpttool.integrations.torch.collectives import any_of, own_group

        if self._group is None:
            self._group = own_group()
        noted = self._signals.noted  # before the collective: another signal may arrive meanwhile
        found = any_of(self._group, noted)
        if reset and noted:
            self._signals.noted = False
        return found

    def _write(
        self,
        root: str,
        request: Request,
        state: Captured,
        records: Sequence[ManifestRecord],
        began: float,
        stall: float | None = None,
    ) -> SaveReport:
        """Write the captured state; never raises."""
        ranks, captured = self._ranks, state.files
        before, nbytes = self._storage.retries.count, sum(f.nbytes for f in captured.files)
        error: CkptError | None = None
        try:
            captured.check_pickles(self._allow)
            # The client state is the same on all ranks.
            unknown = [captured.unknown[f] for f in captured.unknown if ranks.rank == 0 or is_rank_state(f)]
            if names := list(dict.fromkeys(name for classes in unknown for name in classes)):
                LOG.warning("%s: restore needs CheckpointManager(..., allow=%s) to build objects", request.tag, names)
            request = replace(request, sidecars=captured.root_files)
            manifest = two_phase.save(
                self._storage,
                root,
                ranks,
                request,
                captured.files,
                failed=captured.failed,
                records=records,
                index=state.index,
            )
            self.committed = manifest.attempt, manifest.number
            self._parent = None
            if ranks.rank == 0:
                mark_skipped(self._storage, self._skipped)
        except CkptError as failed:
            error = failed
        except Exception as failed:
            LOG.exception("a save failed")
            path = posixpath.join(root, request.tag)
            error = PlanError(path, f"was not saved: {type(failed).__name__}: {failed}", "see the log")
        finally:
            captured.release()
        seconds = time.perf_counter() - began
        retries = self._storage.retries.count - before
        report = SaveReport(
            tag=request.tag,
            step=request.step,
            path=posixpath.join(root, request.tag),
            nbytes=nbytes,
            stall_seconds=seconds if stall is None else stall,
            seconds=seconds,
            retries=retries,
            error=error,
        )
        if error is None:
            LOG.log(logging.DEBUG if ranks.rank else logging.INFO, "%s", report)
        else:
            LOG.error("%s", report)
        self._notify(report)
        if error is None and ranks.rank == 0:
            try:
                maintain(self._storage, root, self._rules, grace=self._grace)
            except Exception:  # the save is committed all the same
                LOG.exception("old checkpoints were not removed")
        return report

    def _notify(self, report: SaveReport) -> None:
        if self._on_save is None:
            return
        try:
            self._on_save(report)
        except Exception:
            LOG.exception("on_save failed")

    @cached_property
    def _ranks(self) -> Ranks:
        """The ranks of the run; they meet at the first save or restore, because a constructor may fail on one."""
        from ckpttool.integrations.torch.collectives import ranks_of_process_group

        return ranks_of_process_group(MEETING, self._timeout)


def _skip_meeting() -> None:
    """Count a failed constructor: the managers of other ranks may exist, and will wait for this count."""
    with contextlib.suppress(ImportError):
        from ckpttool.integrations.torch.collectives import ranks_of_process_group

        ranks_of_process_group(MEETING)


def _none_restorable(root: str, count: int, first: CkptError, *, thin: bool) -> LayoutError:
    """Return the error of a restore that no checkpoint satisfies.

    Args:
        root: The root.
        count: Number of checkpoints.
        first: The error of the newest.
        thin: Whether one of them is thin.
    """
    held = f"{count} checkpoints" if count > 1 else "a checkpoint"
    problem = f"holds {held}, and none can be restored; of the newest: {first.problem}"
    weights = "load the weights of a thin one with ckpttool.load(engine, src, weights_only=True), " if thin else ""
    hint = f"restore one from a copy, {weights}or choose another root to start from scratch"
    return LayoutError(root, problem, hint)


def _open_engine(open_: Opener, storage: Storage, path: str, name: str, wanted: Collection[str]) -> Checkpoint:
    """Open a checkpoint, or the checkpoint of one of its engines.

    Args:
        open_: Opens a checkpoint.
        storage: Its storage.
        path: Its directory.
        name: Name of the engine; "" for one that was saved alone.
        wanted: The names of all engines that go on from it; empty if only weights are loaded.

    Raises:
        PlanError: It was saved of several engines and not all go on from it, or of one, and several are passed.
        CkptError: It cannot be opened.
    """
    try:
        names = _engines_of(storage, path) if name else []
        if name and name not in names:
            if not names:
                open_(storage, path)  # raises unless one engine was saved alone
            held = f"of the engines {', '.join(names)}" if names else "of one engine, saved alone"
            hint = "pass the engines by the names that they were saved with, or an engine alone"
            raise PlanError(path, f"is a checkpoint {held}, and {brief(name)} is not one of them", hint)
        left_out = [one for one in names if one not in wanted] if wanted and {*wanted} <= {*names} else []
        if left_out:
            problem = (
                f"is a checkpoint of the engines {', '.join(names)}, and {', '.join(left_out)} would not be restored"
            )
            hint = "pass all of its engines, or load one from its directory with ckpttool.load"
            raise PlanError(path, problem, hint)
        directory = posixpath.join(path, name) if name else path
        if name and not storage.is_dir(directory):
            raise LayoutError(directory, "is missing, but the manifest lists it", "use another checkpoint")
        return open_(storage, directory)
    except (SeveralModelsError, NoCheckpointError) as error:
        if name or not error.directories:
            raise
        names = [posixpath.basename(one) for one in error.directories]
        hint = f"pass the engines by name: {{{', '.join(f'{name!r}: ...' for name in names)}}}"
        raise PlanError(path, f"contains the checkpoints of several engines: {', '.join(names)}", hint) from error


def _engines_of(storage: Storage, path: str) -> list[str]:
    """Return the names of the engines of a checkpoint: of its manifest, or else the directories below; none of one."""
    names = sorted(read_manifest(storage, path).engines) if is_commit(storage, path) else []
    return names or [posixpath.basename(one) for one in Place(storage, path).engines]


def _attempt_of(storage: Storage, path: str) -> str:
    """Return ``Manifest.attempt`` of a commit; "" for another checkpoint."""
    try:
        return read_manifest(storage, path).attempt if is_commit(storage, path) else ""
    except CkptError:
        return ""
