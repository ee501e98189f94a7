"""The life of the checkpoints in one root: saved from a train loop, found again, and cleared away."""

from __future__ import annotations

import itertools
import logging
import posixpath
import signal
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import partial
from os import fspath
from typing import TYPE_CHECKING, Any

from ckpttool._version import __version__
from ckpttool.catalog.cleanup import tidy
from ckpttool.catalog.restore_order import Candidate
from ckpttool.catalog.retention import Rules
from ckpttool.commit.manifest import REPLACED
from ckpttool.commit.marks import PARTIAL
from ckpttool.commit.signing import read_key
from ckpttool.errors import CkptError, LayoutError, LinkError, PlanError
from ckpttool.formats.whole import open_whole
from ckpttool.messages import brief
from ckpttool.saving.background import Background
from ckpttool.saving.coordination import agree_to_begin
from ckpttool.saving.two_phase import Request, save
from ckpttool.storage import LOCAL, MANIFEST, MARK, is_url, local_path, open_storage, without_credentials
from ckpttool.storage.confined import confined
from ckpttool.storage.retry import RETRIES

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Sequence
    from types import TracebackType

    from ckpttool.commit.signing import Key
    from ckpttool.integrations.deepspeed.capture import Collected
    from ckpttool.integrations.deepspeed.host_memory import HostMemory
    from ckpttool.integrations.deepspeed.report import LoadReport
    from ckpttool.model import Checkpoint
    from ckpttool.saving.coordination import Ranks
    from ckpttool.storage import Storage, WritableStorage

    Opener = Callable[[Storage, str], Checkpoint]

LOG = logging.getLogger("ckpttool")
TIMEOUT = 1800.0
"""Seconds that a rank may be behind, if nothing else is asked for."""
MAX_NAME_BYTES = 200
"""Of a tag: 255 bytes are a name's limit, and names of what replaces or removes it are longer."""
NOT_TAGS = frozenset({"latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py", MANIFEST, MARK})
"""What lies beside tags."""
GRACE = 3600.0
"""Seconds after which what a killed save has left is removed, if nothing else is asked for."""
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How a save went, on one rank."""

    tag: str
    """The checkpoint's name."""
    step: int
    """Steps of the engine."""
    path: str
    """Its directory."""
    nbytes: int
    """Bytes that this rank wrote."""
    stall_seconds: float
    """How long the train loop stood still."""
    seconds: float
    """From the call to the commit."""
    retries: int
    """Requests that were made again because the store failed."""
    error: CkptError | None = None
    """Why it was not saved; None if it was."""

    @property
    def bytes_per_second(self) -> float:
        """What this rank wrote, over the time from the call to the commit."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.tag} was not saved: {self.error}"
        text = (
            f"saved {self.tag} (step {self.step}): {self.nbytes / 1e6:,.1f} MB of this rank in {self.seconds:.2f} s "
            f"({self.bytes_per_second / 1e6:,.0f} MB/s), training stood still for {self.stall_seconds:.3f} s"
        )
        return f"{text}, {self.retries} retries" if self.retries else text


class CheckpointManager:
    """Saves and restores the state of a DeepSpeed engine; make one on every rank, with the same arguments.

    A save is a plain DeepSpeed checkpoint that is committed as a whole or not at all; nobody needs ckpttool to load it.

    Args:
        root: Directory or URL of all checkpoints of the run; every rank must reach it.
        keep_last: Keep so many of the newest. Without any rule all are kept.
        keep_every: Keep those whose step is a multiple of this.
        keep_best: ("eval_loss", "min", 2): keep the two with the smallest of that metric; "max" for the largest.
        async_save: Let the train loop go on as soon as the state is copied to the host's memory, and write in the
            background.
        timeout: Seconds that a rank may be behind the others before a save is given up.
        grace: Seconds after which what a killed save has left is removed, by the newest of its files.
        on_save: Called on every rank after each save, in the thread that saved.
        signals: Announce the end of the run, as ``signal.SIGTERM`` does on most clusters; see ``preempted``.
        storage_options: What to tell the storage's fsspec class; default: what it finds itself. With ``follow_links``,
            ``restore`` follows links on local disk that leave the root.
        allow: Classes ("module.Class") of objects in the client state that ``restore`` builds, which runs their code.
        sign_key: Signs what is saved: SHA-256 of all files, and an HMAC-SHA256 over the manifest. Bytes are the key
            itself; a path names the file that holds it, "env:NAME" an environment variable. The same on every rank.
        storage: Storage of the root, if the caller has it open; default: opened by the URL of the root.

    Raises:
        ValueError: A rule makes no sense; or signals are to be watched in a thread that is not the main one.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, str, int] | None = None,
        async_save: bool = False,
        timeout: float = TIMEOUT,
        grace: float = GRACE,
        on_save: Callable[[SaveReport], None] | None = None,
        signals: Sequence[int] = (),
        storage_options: Mapping[str, Any] | None = None,
        allow: Collection[str] = (),
        sign_key: Key | None = None,
        storage: WritableStorage | None = None,
    ) -> None:
        self.name = f"manager {next(_numbers)}"  # counted even if the rest fails here, for it may not on other ranks
        """The same on every rank."""
        given = fspath(root)
        self.root = without_credentials(local_path(given)).rstrip("/") or given
        if not is_url(self.root):
            self.root = posixpath.abspath(self.root)  # the train loop may change the working directory
        self._storage = storage or open_storage(given, storage_options)
        self.source = confined(self._storage, self.root, storage_options)
        """The storage that ``restore`` reads from."""
        best = None if keep_best is None else ":".join(map(str, keep_best))
        given_rules = (keep_last, keep_every, best)
        self._rules = None if given_rules == (None, None, None) else Rules(*given_rules)
        self.saves_in_background = async_save
        """Whether ``save`` returns before the checkpoint is committed."""
        self._allow = tuple(sorted(allow))
        self._key = read_key(sign_key)
        self._timeout = timeout
        self._grace = grace
        self._on_save = on_save
        self._ranks: Ranks | None = None
        self._memory: HostMemory | None = None
        self._background = Background()
        self._signalled = False
        self._group: Any = None
        self.restored: LoadReport | None = None
        """How the last ``restore`` went."""
        for number in signals:
            self._watch(number)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
            return
        try:
            self.wait()
        except CkptError as failed:
            LOG.error("%s", failed)  # noqa: TRY400  the error that is on its way says more

    def save(
        self,
        engine: Any,
        *,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> SaveReport | None:
        """Save the engine's state, on every rank at the same step.

        Args:
            engine: What ``deepspeed.initialize`` returned.
            tag: The checkpoint's name. Default: DeepSpeed's, "global_step" and the number of steps.
            client_state: What to save along; ``restore`` returns it.
            metrics: Numbers that say how good the model is; those of the first rank count.
            overwrite: Replace a checkpoint of that name.
            exclude_frozen_parameters: Leave them out, as ``engine.save_checkpoint`` does.

        Returns:
            How it went; None while it is being written in the background.

        Raises:
            CkptError: This save failed, or the one before it that ran in the background; says which rank and why.
                Nothing was committed.
        """
        self.wait()
        return self.save_into(
            self.root, engine, tag=tag, client_state={} if client_state is None else client_state,
            metrics={} if metrics is None else metrics, overwrite=overwrite, exclude_frozen=exclude_frozen_parameters,
        )  # fmt: skip

    def save_into(
        self, root: str, engine: Any, *, tag: str | None, client_state: Mapping[str, Any],
        metrics: Mapping[str, float], overwrite: bool, exclude_frozen: bool, before: tuple[str, int] | None = None,
    ) -> SaveReport | None:  # fmt: skip
        """As ``save``, into another root of the same storage, after ``wait``: for who gives each checkpoint its own."""
        began = time.perf_counter()
        from ckpttool.integrations.deepspeed.capture import check_engine, collect, groups_without_zero

        requests: list[Request] = []

        def check() -> None:
            check_engine(engine)
            requests.append(
                Request(
                    tag=_checked_tag(f"global_step{int(engine.global_steps)}" if tag is None else tag),
                    step=int(engine.global_steps),
                    stage=int(engine.zero_optimization_stage()),
                    metrics=_checked_metrics(metrics),
                    versions=_versions(),
                    overwrite=overwrite,
                    groups=groups_without_zero(engine),
                    before=before,
                )
            )
            _check_client_state(client_state)

        ranks = self._meet()
        asked = {
            "root": root, "tag": tag, "overwrite": overwrite, "exclude_frozen_parameters": exclude_frozen,
            "async_save": self.saves_in_background, "step": getattr(engine, "global_steps", None),
        }  # fmt: skip
        what = posixpath.join(root, str(tag)) if tag is not None else root
        agree_to_begin(ranks, what, asked, check, timeout=self._timeout)
        (request,) = requests
        collected = collect(
            engine, tag=request.tag, client_state=client_state, memory=self._host_memory(engine),
            exclude_frozen=exclude_frozen, scratch_root=self.root if self._storage is LOCAL else None,
        )  # fmt: skip
        if not self.saves_in_background:
            report = self._write(root, ranks, request, collected, began, None)
            if report.error is not None:
                raise report.error
            return report
        stall = time.perf_counter() - began
        try:
            self._background.start(lambda: self._write(root, ranks, request, collected, began, stall).error)
        except RuntimeError as error:
            collected.release()
            problem = f"was not saved: the program is ending ({error})"
            raise PlanError(posixpath.join(root, request.tag), problem, "save before its end") from error
        return None

    @property
    def saving(self) -> bool:
        """Whether this rank's background save is running now."""
        return self._background.running

    def wait(self) -> None:
        """Wait until what is being saved in the background is committed.

        Raises:
            CkptError: It was not.
        """
        self._background.wait()

    def restore(
        self, engine: Any, *, tag: str | None = None, strict: bool = True, weights_only: bool = False,
        require_committed: bool = False, require_signed: bool = False,
    ) -> dict[str, Any] | None:  # fmt: skip
        """Load the newest whole checkpoint into the engine, on every rank; ranks and ZeRO stage may be other ones.

        What is torn or damaged is passed over, with a warning in the log. All that is read of what this class saved is
        compared with its checksums before the engine is touched.

        Args:
            engine: What ``deepspeed.initialize`` returned.
            tag: Load this one and no other.
            strict: As for ``ckpttool.load``.
            weights_only: As for ``ckpttool.load``.
            require_committed: Take nothing without a manifest, as DeepSpeed's own saves are: an error if it is the
                newest.
            require_signed: Take only what was signed with ``sign_key``, and compare the SHA-256 of all that is read.

        Returns:
            The client state that was saved along; None if there is no checkpoint. ``restored`` says more.

        Raises:
            CkptError: There are checkpoints, and none of them can be restored; the same on every rank.
        """
        return self._restore(
            engine, tag, strict=strict, weights_only=weights_only, dry_run=False,
            committed=require_committed, signed=require_signed,
        )  # fmt: skip

    def preview(
        self, engine: Any, *, tag: str | None = None, strict: bool = True, weights_only: bool = False,
        require_committed: bool = False, require_signed: bool = False,
    ) -> LoadReport | None:  # fmt: skip
        """Say what ``restore`` would do, on every rank; the engine stays as it is. None if there is no checkpoint."""
        before = self.restored
        try:
            self._restore(
                engine, tag, strict=strict, weights_only=weights_only, dry_run=True,
                committed=require_committed, signed=require_signed,
            )  # fmt: skip
            return self.restored
        finally:
            self.restored = before

    def _restore(
        self, engine: Any, tag: str | None, *, strict: bool, weights_only: bool, dry_run: bool, committed: bool,
        signed: bool,
    ) -> dict[str, Any] | None:  # fmt: skip
        self.wait()
        from ckpttool.integrations.deepspeed.newest import find

        found = self.begin_restore(
            engine, lambda: [astuple(c) for c in find(self.source, self.root, tag)],
            root=self.root, tag=tag, strict=strict, weights_only=weights_only, dry_run=dry_run, committed=committed,
            signed=signed,
        )  # fmt: skip
        return self.restore_any(
            [Candidate(*one) for one in found], engine, strict=strict, weights_only=weights_only, dry_run=dry_run,
            passing_over=tag is None, open_=self.opener(committed=committed, signed=signed),
        )  # fmt: skip

    def opener(self, *, committed: bool = False, signed: bool = False) -> Opener:
        """What opens a checkpoint to restore.

        Args:
            committed: Only if it has a manifest.
            signed: Only if that is signed with the manager's key.

        Raises:
            PlanError: There is no key.
        """
        if signed and self._key is None:
            raise PlanError(self.root, "cannot be told to be signed without a key", "pass sign_key to the manager")
        return partial(open_whole, key=self._key if signed else None, committed=committed)

    def begin_restore(self, engine: Any, look: Callable[[], Any], **arguments: Any) -> Any:
        """What a function finds on the first rank, when all ranks are ready to restore the same."""
        from ckpttool.integrations.deepspeed.engine import look as look_at

        return agree_to_begin(
            self._meet(), self.root, arguments, lambda: _forget(look_at(engine)), timeout=self._timeout, decide=look
        )

    def restore_any(
        self, found: Sequence[Candidate], engine: Any, *, strict: bool, weights_only: bool, dry_run: bool,
        passing_over: bool, open_: Opener = open_whole,
    ) -> dict[str, Any] | None:  # fmt: skip
        """Restore the first of some checkpoints, or, if it is damaged and may be passed over, the next."""
        from ckpttool.integrations.deepspeed.load import restore_engine
        from ckpttool.integrations.torch.collectives import agree_on_all_ranks, open_together

        self.restored = None
        ranks, storage = self._meet(), self.source
        first: CkptError | None = None
        for candidate in found:
            try:
                checkpoint = open_together(
                    candidate.path, storage, partial(open_, storage, candidate.path), ranks, timeout=self._timeout
                )
                report = restore_engine(
                    engine, checkpoint, strict=strict, weights_only=weights_only, dry_run=dry_run,
                    allow=self._allow, agree=partial(agree_on_all_ranks, ranks, candidate.path, timeout=self._timeout),
                )  # fmt: skip
            except (PlanError, LinkError):
                raise  # it is whole, and does not fit, or the user has to say more: an older one is no better
            except CkptError as error:
                if not passing_over:
                    raise
                if ranks.rank == 0:  # the others would say the same
                    LOG.warning("%s cannot be restored, trying the one before it: %s", candidate.path, error)
                first = first or error
                continue
            if not dry_run and ranks.rank == 0:
                LOG.info("%s", report)
            self.restored = report
            return dict(report.client_state)
        if first is not None:
            count = f"{len(found)} checkpoints" if len(found) > 1 else "a checkpoint"
            problem = f"holds {count}, and none can be restored; of the newest: {first.problem}"
            raise LayoutError(self.root, problem, "restore one from a copy, or choose another root to begin anew")
        return None

    def preempted(self, *, reset: bool = False) -> bool:
        """Whether a signal has announced the end of the run, to any rank; call it on every rank, once a step.

        If so, save, wait, and leave the loop: the signal itself is noted, and does no more.

        Args:
            reset: Forget the signal now that it is told: for who goes on training. The same on every rank.
        """
        from ckpttool.integrations.torch.process_group import any_of, own_group

        if self._group is None:
            self._group = own_group()
        noted = self._signalled  # another may come meanwhile
        found = any_of(self._group, noted)
        if reset and noted:
            self._signalled = False
        return found

    def _watch(self, number: int) -> None:
        try:
            before = signal.getsignal(number)
        except (ValueError, TypeError) as error:
            raise ValueError(f"signals: {number!r} is no signal") from error

        def note(caught: int, frame: Any) -> None:
            self._signalled = True
            if callable(before):
                before(caught, frame)

        try:
            signal.signal(number, note)
        except OSError as error:
            raise ValueError(f"signals: {signal.Signals(number).name} cannot be watched by any program") from error

    def _write(
        self, root: str, ranks: Ranks, request: Request, collected: Collected, began: float, stall: float | None
    ) -> SaveReport:
        """Write what was collected; never raises."""
        before, nbytes = RETRIES.count, sum(f.nbytes for f in collected.files)
        error: CkptError | None = None
        try:
            collected.prove(self._allow)
            if collected.unknown and ranks.rank == 0:
                names = list(dict.fromkeys(collected.unknown))
                LOG.warning("%s: restore needs CheckpointManager(..., allow=%s) to build objects", request.tag, names)
            save(
                self._storage, root, ranks, request, collected.files, beside=collected.beside,
                failed=collected.failed, timeout=self._timeout, key=self._key,
            )  # fmt: skip
        except CkptError as failed:
            error = failed
        except Exception as failed:
            LOG.exception("a save failed")
            path = posixpath.join(root, request.tag)
            error = PlanError(path, f"was not saved: {type(failed).__name__}: {failed}", "see the log")
        finally:
            collected.release()
        seconds = time.perf_counter() - began
        report = SaveReport(
            tag=request.tag, step=request.step, path=posixpath.join(root, request.tag), nbytes=nbytes,
            stall_seconds=seconds if stall is None else stall, seconds=seconds, retries=RETRIES.count - before,
            error=error,
        )  # fmt: skip
        if error is None:
            LOG.log(logging.DEBUG if ranks.rank else logging.INFO, "%s", report)
        else:
            LOG.error("%s", report)
        self._tell(report)
        if error is None and ranks.rank == 0:
            try:
                tidy(self._storage, root, self._rules, grace=self._grace)
            except Exception:  # it is committed all the same
                LOG.exception("old checkpoints were not looked at")
        return report

    def _tell(self, report: SaveReport) -> None:
        if self._on_save is None:
            return
        try:
            self._on_save(report)
        except Exception:
            LOG.exception("on_save failed")

    def _meet(self) -> Ranks:
        if self._ranks is None:
            from ckpttool.integrations.torch.process_group import ranks_of_process_group

            self._ranks = ranks_of_process_group(self.name)
        return self._ranks

    def _host_memory(self, engine: Any) -> HostMemory | None:
        """Where to copy the state to: what lies on a device must pass through the host in any case."""
        on_device = engine.device.type != "cpu"
        if self._memory is None and (self.saves_in_background or on_device):
            from ckpttool.integrations.deepspeed.host_memory import HostMemory

            self._memory = HostMemory(pinned=on_device)
        return self._memory


def _forget(value: object) -> None:
    """Take no note of a value."""


def _checked_tag(given: Any) -> str:
    tag = str(given)
    if not tag.isprintable() or any(part in {"", ".", ".."} or part.startswith(".") for part in tag.split("/")):
        raise ValueError(f"{tag!r} cannot be a tag: it must be printable, and no part of it may begin with a dot")
    if any(len(part.encode()) > MAX_NAME_BYTES for part in tag.split("/")):
        raise ValueError(f"{tag[:40]!r}... cannot be a tag: no part of it may be longer than {MAX_NAME_BYTES} bytes")
    if tag in NOT_TAGS or tag.endswith((REPLACED, PARTIAL, ".removed")):
        raise ValueError(f"{tag!r} cannot be a tag: files of that name lie beside checkpoints")
    return tag


def _check_client_state(client_state: Any) -> None:
    """Make sure that what a train loop saves along comes back under its names.

    Raises:
        PlanError: It would not.
    """
    from ckpttool.formats.zero.module import ENGINE_KEYS

    if not isinstance(client_state, Mapping):
        problem = f"is a {type(client_state).__name__}, not a mapping"
        raise PlanError("client_state", problem, 'pass a dict, as client_state={"step": step}')
    for name in client_state:
        if not isinstance(name, str):
            raise PlanError("client_state", f"has the name {brief(name)}, which is no text", "use texts as names")
    if taken := sorted(set(client_state) & (ENGINE_KEYS | {"folding"})):
        problem = f"has names that are DeepSpeed's own in the same file: {', '.join(taken)}"
        raise PlanError("client_state", problem, "use other names")


def _checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, OverflowError, AttributeError, RuntimeError) as error:
        problem = f"cannot be saved: metrics must be a mapping of names to numbers ({type(error).__name__}: {error})"
        raise PlanError("metrics", problem, "pass floats, and leave out what was not measured") from error


def _versions() -> dict[str, str]:
    import deepspeed
    import torch

    return {"ckpttool": __version__, "deepspeed": str(deepspeed.__version__), "torch": str(torch.__version__)}
