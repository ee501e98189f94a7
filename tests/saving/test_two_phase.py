"""The two-phase save: refusals and messages."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.catalog.cleanup import left_over, maintain
from ckpttool.catalog.restore_order import candidates
from ckpttool.catalog.retention import Rules
from ckpttool.checksums import crc32
from ckpttool.commit.manifest import REPLACED, Manifest, read_manifest
from ckpttool.errors import CkptError, ContainerError, PlanError, StorageError
from ckpttool.formats import open_whole
from ckpttool.formats.scan import scan
from ckpttool.saving import two_phase
from ckpttool.saving.coordination import Alone, RankError, Ranks
from ckpttool.saving.files import ArchiveFile, HostPayload, PlainFile, write_files
from ckpttool.saving.two_phase import Request, save
from ckpttool.storage import LOCAL, MANIFEST, MARK, LocalStorage, aside_name
from ckpttool.storage.base import SET_ASIDE
from ckpttool.units import format_size
from tests.faults.disks import Machine
from tests.saving import crew
from tests.saving.checkpoints import Intercepted, chosen, content, part, save_version, version, whole
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.saving.files import OutgoingFile


@pytest.fixture
def root(directory: Path) -> str:
    return str(directory / "root")


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[crew.Outcome]]:
    """Lets three ranks do something."""
    clock = crew.Clock()
    crew.install(clock, monkeypatch)
    return lambda task: crew.Crew(3, Machine(), clock).do(task)


def put(root: str, tag: str, number: int, **options: Any) -> Manifest:
    return save_version(LOCAL, root, Alone(), tag, number, **options)


def plain(root: str, tag: str, number: int) -> None:
    """As DeepSpeed itself saves."""
    os.makedirs(f"{root}/{tag}")
    for name, data in version(number).items():
        with open(f"{root}/{tag}/{name}", "wb") as file:
            file.write(data)


def order(root: str) -> list[str]:
    return [c.tag for c in candidates(LOCAL, root)]


def aged(root: str, *paths: str) -> None:
    """Let these have been written one after the other."""
    for number, path in enumerate(paths):
        os.utime(f"{root}/{path}", (1e9 + 100 * number,) * 2)


# ----------------------------------------------------------------------------------------------------------- saving


def test_manifest_says_what_was_written(root: str) -> None:
    made = put(root, "step1", 1, metrics={"loss": 0.5})
    found = read_manifest(LOCAL, f"{root}/step1")
    assert found.files.keys() == version(1).keys()
    assert found.nbytes == sum(map(len, version(1).values()))
    assert (found.tag, found.step, found.world_size, found.stage, found.metrics) == ("step1", 1, 1, 2, {"loss": 0.5})
    assert found.attempt == made.attempt
    assert sorted(os.listdir(f"{root}/step1")) == sorted([*version(1), MANIFEST])
    assert sorted(os.listdir(root)) == ["latest", "step1", "zero_to_fp32.py"]
    assert LOCAL.read_text(f"{root}/latest") == "step1"


def test_verify_finds_a_save_sound(root: str) -> None:
    put(root, "step1", 1)
    findings = [f for f in ckpttool.verify(root, deep=True).findings if "CRC" not in str(f)]
    # The versions differ from the fixture in one byte, which its archive's own checksums tell.
    plain(root, "fixture", 0)
    assert ckpttool.verify(f"{root}/fixture", deep=True).findings == ()
    put(root, "step2", 0)
    assert ckpttool.verify(f"{root}/step2", deep=True).findings == ()
    assert len(findings) <= 10


class _Noted:
    """A record that notes its calls."""

    def __init__(self, rank: int) -> None:
        self.rank, self.threads = rank, set[str]()

    def message(self) -> dict[str, int]:
        self.threads.add(threading.current_thread().name)
        return {"rank": self.rank}

    def fields(self, messages: Any) -> dict[str, dict[str, Any]]:
        return {"": {"digests": {"ranks": [one["rank"] for one in messages]}}}


def test_records_of_all_ranks_give_fields_of_the_manifest(
    root: str, together: Callable[..., list[crew.Outcome]]
) -> None:
    made = [_Noted(rank) for rank in range(3)]

    def task(ranks: Ranks) -> Any:
        return save(LOCAL, root, ranks, Request("a", 1, 2), part(version(1), ranks.rank, 3), records=[made[ranks.rank]])

    assert [outcome.error for outcome in together(task)] == [None] * 3
    assert read_manifest(LOCAL, f"{root}/a").digests == {"ranks": [0, 1, 2]}
    assert [one.threads for one in made] == [{"ckpttool-record"}] * 3


def test_records_give_fields_of_each_engine(root: str) -> None:
    engine = {"step": 1, "stage": 2, "groups": [], "optimizer": "", "batch": {}}
    record = _Noted(7)
    record.fields = lambda messages: {"b": {"optimizer": f"of {messages[0]['rank']}"}}  # type: ignore[method-assign]
    files = [PlainFile(f"{name}/x", HostPayload(b"x")) for name in "ab"]
    save(LOCAL, root, Alone(), Request("t", 1, 2, engines={"a": engine, "b": engine}), files, records=[record])
    engines = read_manifest(LOCAL, f"{root}/t").engines
    assert {name: own["optimizer"] for name, own in engines.items()} == {"a": "", "b": "of 7"}


def test_a_save_that_cannot_begin_waits_for_its_records(root: str) -> None:
    put(root, "a", 1)
    record = _Noted(0)
    with pytest.raises(CkptError):
        save(LOCAL, root, Alone(), Request("a", 1, 2), part(version(1), 0, 1), records=[record])
    assert record.threads


def test_a_missing_manifest_is_refused_if_required(root: str) -> None:
    put(root, "t", 1)
    open_whole(LOCAL, f"{root}/t", committed=True)
    os.unlink(f"{root}/t/{MANIFEST}")
    open_whole(LOCAL, f"{root}/t")
    with refused(PlanError):
        open_whole(LOCAL, f"{root}/t", committed=True)


def test_tag_that_is_there_is_refused_on_every_rank(root: str, together: Callable[..., list[crew.Outcome]]) -> None:
    put(root, "step1", 1)
    outcomes = together(lambda ranks: save_version(LOCAL, root, ranks, "step1", 2))
    assert {str(o.error) for o in outcomes} == {
        f"{root}/step1: is saved already; choose another tag, or pass overwrite=True"
    }
    assert whole(root) == {"step1": version(1)}


def test_files_of_somebody_are_not_removed(root: str) -> None:
    os.makedirs(f"{root}/step1")
    open(f"{root}/step1/notes.txt", "w").close()
    with refused(StorageError):
        put(root, "step1", 1)
    assert os.listdir(f"{root}/step1") == ["notes.txt"]


def test_overwriting_takes_no_other_checkpoint_along(root: str) -> None:
    put(root, "epoch1/step5", 1)
    with refused(StorageError):
        put(root, "epoch1", 2, overwrite=True)
    assert content(LOCAL, f"{root}/epoch1/step5") == version(1)


def test_set_aside_checkpoint_is_not_removed_for_what_is_none(root: str) -> None:
    put(root, "step1", 1)
    os.rename(f"{root}/step1", f"{root}/step1.replaced")
    os.makedirs(f"{root}/step1")
    open(f"{root}/step1/notes.txt", "w").close()
    with refused(StorageError):
        put(root, "step1", 2, overwrite=True)
    assert whole(root) == {"step1.replaced": version(1)}


def test_plain_save_can_be_replaced(root: str) -> None:
    plain(root, "step1", 1)
    with refused(StorageError):
        put(root, "step1", 2)
    put(root, "step1", 2, overwrite=True)
    assert whole(root) == {"step1": version(2)}


@pytest.mark.parametrize("odd", ["tag", "step"])
def test_ranks_that_do_not_agree(root: str, together: Callable[..., list[crew.Outcome]], odd: str) -> None:
    def work(ranks: Ranks) -> Manifest:
        tag = "other" if odd == "tag" and ranks.rank == 2 else "step1"
        request = Request(tag, 2 if odd == "step" and ranks.rank == 2 else 1, 2)
        return save(LOCAL, root, ranks, request, part(version(1), ranks.rank, 3))

    outcomes = together(work)
    assert all(isinstance(o.error, RankError) for o in outcomes)
    assert all("rank 0 saves it at step 1, rank 2" in str(o.error) for o in outcomes)
    assert not os.path.exists(root)


def test_rank_that_cannot_take_part(root: str, together: Callable[..., list[crew.Outcome]]) -> None:
    put(root, "step1", 1)
    sick = StorageError("model.pt", "cannot be pickled", "see client_state")

    def work(ranks: Ranks) -> Manifest:
        files = part(version(2), ranks.rank, 3)
        failed = sick if ranks.rank == 1 else None
        return save(LOCAL, root, ranks, Request("step2", 2, 2), files, failed=failed)

    texts = {str(o.error) for o in together(work)}
    assert texts == {f"{root}/step2: was not saved: rank 1: {sick}; nothing was committed"}
    assert sorted(os.listdir(root)) == ["latest", "step1", "zero_to_fp32.py"]
    assert order(root) == ["step1"]


def test_root_that_ranks_do_not_share(directory: Path, together: Callable[..., list[crew.Outcome]]) -> None:
    def work(ranks: Ranks) -> Manifest:
        own = str(directory / f"node{ranks.rank // 2}")
        files = part(version(1), ranks.rank, 3)
        ranks.timeout = 100
        return save(LOCAL, own, ranks, Request("step1", 1, 2), files)

    texts = {str(o.error) for o in together(work)}
    assert len(texts) == 1
    text = texts.pop()
    assert "rank 2: " in text
    assert "was created by rank 0, but not all ranks see it; choose a root that all nodes share" in text
    assert chosen(str(directory / "node0")) is None
    assert not os.path.exists(directory / "node1" / "step1")


def test_two_ranks_with_one_file(root: str, together: Callable[..., list[crew.Outcome]]) -> None:
    files = [PlainFile("same.pt", HostPayload(b"x"))]
    outcomes = together(lambda ranks: save(LOCAL, root, ranks, Request("step1", 1, 2), files))
    assert all("two ranks would write same.pt" in str(o.error) for o in outcomes)


class _AlmostFull(LocalStorage):
    def __init__(self, free: int) -> None:
        self._free = free

    def free_bytes(self, directory: str) -> int:
        return self._free


def test_no_room(root: str, together: Callable[..., list[crew.Outcome]]) -> None:
    put(root, "step1", 1)
    total = sum(map(len, version(2).values()))
    outcomes = together(lambda ranks: save_version(_AlmostFull(total), root, ranks, "step2", 2))
    needed = int(two_phase.SPACE_FACTOR * total)
    assert {str(o.error) for o in outcomes} == {
        f"{root}/step2: needs {format_size(needed)}, but only {format_size(total)} are free; "
        "free some space, keep fewer checkpoints, or choose another root"
    }
    assert not os.path.exists(f"{root}/step2")
    save_version(_AlmostFull(needed), root, Alone(), "step2", 2)


@pytest.mark.parametrize("fails", ["no room", "no lasting rename", "no mark"])
def test_a_save_that_cannot_begin_leaves_what_it_was_to_replace(
    fails: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(root, "step1", 1)
    with monkeypatch.context() as patch:
        if fails == "no room":
            patch.setattr(LocalStorage, "free_bytes", lambda self, directory: 0)
        elif fails == "no lasting rename":
            set_aside = LocalStorage.rename

            def rename_and_fail(self: LocalStorage, directory: str, aside: str) -> bool:
                set_aside(self, directory, aside)
                if aside.endswith(REPLACED):
                    raise StorageError(directory, "input/output error", "check the disk")
                return True

            patch.setattr(LocalStorage, "rename", rename_and_fail)
        else:

            def put_no_mark(self: LocalStorage, path: str, data: bytes) -> None:
                raise StorageError(path, "no space left on the device", "free some space")

            patch.setattr(LocalStorage, "put", put_no_mark)
        with pytest.raises(StorageError):
            put(root, "step1", 2, overwrite=True)
    assert [name for name in os.listdir(root) if name.startswith("step")] == ["step1"]
    assert chosen(root) == ("step1", version(1))
    put(root, "step1", 2, overwrite=True)
    assert chosen(root) == ("step1", version(2))


def test_an_unexpected_error_of_one_rank_is_raised_on_all(
    root: str, together: Callable[..., list[crew.Outcome]]
) -> None:
    def fails(storage: Any, directory: str, files: Any, *checks: Any) -> Any:
        if any("rank_1" in file.name for file in files):
            raise KeyError("unforeseen")
        return write_files(storage, directory, files, *checks)

    outcomes = together(lambda ranks: save_version(Intercepted(LOCAL, fails), root, ranks, "step1", 1))
    assert len({str(o.error) for o in outcomes}) == 1
    assert "KeyError: 'unforeseen'" in str(outcomes[0].error)
    assert os.listdir(root) == []


def test_free_bytes_are_the_user_s(directory: Path) -> None:
    info = os.statvfs(directory)
    free = LOCAL.free_bytes(str(directory))
    assert free is not None
    assert abs(free - info.f_bavail * info.f_frsize) < 1 << 30


def test_disk_that_fills_when_a_file_gets_its_place(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes
    import errno

    from ckpttool.storage import system_calls

    def full(fd: int, mode: int, start: int, nbytes: int) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    put(root, "step1", 1)
    monkeypatch.setattr(system_calls, "_fallocate", lambda: full)
    with refused(RankError):
        put(root, "step2", 2)
    assert sorted(os.listdir(root)) == ["latest", "step1", "zero_to_fp32.py"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_root_that_may_not_be_written(directory: Path) -> None:
    os.chmod(directory, 0o500)
    try:
        with pytest.raises(StorageError, match="permission denied"):
            put(str(directory / "root"), "step1", 1)
    finally:
        os.chmod(directory, 0o700)


@pytest.mark.parametrize("name", ["root", "root/step1"])
def test_file_in_the_way(directory: Path, name: str) -> None:
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text("mine")
    with refused(StorageError):
        put(str(directory / "root"), "step1", 1)
    assert (directory / name).read_text() == "mine"


def test_files_in_directories(root: str) -> None:
    files = [PlainFile("zero/a/1.pt", HostPayload(b"one")), PlainFile("zero/b.pt", HostPayload(b""))]
    save(LOCAL, root, Alone(), Request("step1", 1, 0), files)
    assert content(LOCAL, f"{root}/step1") == {"zero/a/1.pt": b"one", "zero/b.pt": b""}


# ---------------------------------------------------------------------------------------------------------- finding


def test_newest_first(root: str) -> None:
    for step in (9, 10, 11):
        put(root, f"step{step}", step % 9)
    assert order(root)[0] == "step11"
    assert LOCAL.read_text(f"{root}/latest") == "step11"


def test_latest_that_the_user_set_counts(root: str) -> None:
    for step in (1, 2, 3):
        put(root, f"step{step}", step)
    with open(f"{root}/latest", "w") as file:
        file.write("step1\n")
    aged(root, *(f"step{s}/{MANIFEST}" for s in (1, 2, 3)), "latest")
    assert order(root) == ["step1", "step3", "step2"]


def test_commit_that_latest_does_not_know_yet(root: str) -> None:
    put(root, "step1", 1)
    put(root, "step2", 2)
    with open(f"{root}/latest", "w") as file:
        file.write("step1")
    with open(f"{root}/step2/{MARK}", "w") as file:  # which goes when latest is written
        file.write("{}")
    aged(root, f"step2/{MANIFEST}", f"step1/{MANIFEST}", "latest")
    assert order(root) == ["step2", "step1"]


@pytest.mark.parametrize("latest", [None, b"", b"gone", b"\xff\xfe", b"../elsewhere", b"a\nb"])
def test_latest_that_says_nothing(root: str, latest: bytes | None) -> None:
    put(root, "step1", 1)
    put(root, "step2", 2)
    os.unlink(f"{root}/latest")
    if latest is not None:
        with open(f"{root}/latest", "wb") as file:
            file.write(latest)
    assert order(root) == ["step2", "step1"]


def test_plain_saves_count_too(root: str) -> None:
    put(root, "step2", 2)
    plain(root, "global_step3", 3)
    plain(root, "global_step1", 1)
    assert order(root) == ["step2", "global_step3", "global_step1"]
    with open(f"{root}/latest", "w") as file:
        file.write("global_step3")
    aged(root, f"step2/{MANIFEST}", "latest")
    assert order(root) == ["global_step3", "step2", "global_step1"]
    assert whole(root) == {"global_step3": version(3), "step2": version(2), "global_step1": version(1)}


def test_nested_tag_that_latest_names(root: str) -> None:
    put(root, "step1", 1)
    put(root, "epoch1/step5", 5)
    assert order(root) == ["epoch1/step5", "step1"]
    found = chosen(root)
    assert found == ("epoch1/step5", version(5))


def test_other_directories_are_not_checkpoints(root: str) -> None:
    put(root, "step1", 1)
    os.makedirs(f"{root}/logs/deep")
    os.makedirs(f"{root}/{aside_name('step0')}")
    plain(root, "step7", 7)
    open(f"{root}/step7/{MARK}", "w").close()
    open(f"{root}/notes.txt", "w").close()
    assert order(root) == ["step1"]
    assert candidates(LOCAL, f"{root}/nothing") == []


@pytest.mark.parametrize("damage", ["missing", "short", "flipped", "manifest", "manifest gone"])
def test_damage_is_found(root: str, damage: str) -> None:
    put(root, "step1", 1)
    name = sorted(version(1))[0]
    path = f"{root}/step1/{name}"
    if damage == "missing":
        os.unlink(path)
    elif damage == "short":
        os.truncate(path, os.path.getsize(path) - 1)
    elif damage == "flipped":
        with open(path, "r+b") as file:
            file.seek(len(version(1)[name]) // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x10]))
    elif damage == "manifest":
        os.truncate(f"{root}/step1/{MANIFEST}", 10)
    else:
        os.unlink(f"{root}/step1/{MANIFEST}")
        assert content(LOCAL, f"{root}/step1") == version(1)
        return
    with pytest.raises((CkptError, ContainerError)):
        open_whole(LOCAL, f"{root}/step1")


# ----------------------------------------------------------------------------------------------------------- upkeep


def test_the_best_stay(root: str) -> None:
    for number, loss in enumerate([0.9, 0.2, 0.5, 0.1, 0.7], 1):
        put(root, f"step{number}", number, metrics={"loss": loss})
    maintain(LOCAL, root, Rules(best="loss:min:2"), grace=0)
    assert whole(root).keys() == {"step2", "step4", "step5"}  # the newest in any case
    maintain(LOCAL, root, Rules(best="loss:max"), grace=0)
    assert whole(root).keys() == {"step5"}


def test_no_metric_is_no_reason_to_remove(root: str) -> None:
    put(root, "step1", 1)
    put(root, "step2", 2)
    maintain(LOCAL, root, Rules(best="loss"), grace=0)
    assert whole(root).keys() == {"step1", "step2"}
    maintain(LOCAL, root, Rules(last=1, best="loss"), grace=0)
    assert whole(root).keys() == {"step2"}


def test_damaged_manifest_does_not_end_retention(root: str) -> None:
    for number in (1, 2, 3, 4):
        put(root, f"step{number}", number)
    os.truncate(f"{root}/step2/{MANIFEST}", 10)
    maintain(LOCAL, root, Rules(last=1), grace=0)
    assert sorted(d for d in os.listdir(root) if d.startswith("step")) == ["step2", "step4"]


def test_a_recent_directory_may_belong_to_a_running_save(root: str) -> None:
    put(root, "step1", 1)
    os.makedirs(f"{root}/step2")
    open(f"{root}/step2/{MARK}", "w").close()
    maintain(LOCAL, root, None, grace=3600)
    assert os.path.exists(f"{root}/step2")
    assert left_over(scan(LOCAL, root), grace=3600) == {}
    aged(root, f"step2/{MARK}")
    assert list(left_over(scan(LOCAL, root), grace=3600)) == [f"{root}/step2"]
    maintain(LOCAL, root, None, grace=3600)
    assert not os.path.exists(f"{root}/step2")


def test_the_marker_of_a_committed_checkpoint_is_cleared(root: str) -> None:
    put(root, "step1", 1)
    open(f"{root}/step1/{MARK}", "w").close()
    assert whole(root) == {"step1": version(1)}
    maintain(LOCAL, root, None, grace=3600)
    assert not os.path.exists(f"{root}/step1/{MARK}")


def test_a_replaced_checkpoint_stays_until_the_commit(root: str) -> None:
    put(root, "step1", 1)
    shutil.copytree(f"{root}/step1", f"{root}/step2.replaced")
    open(f"{root}/step2.replaced/{SET_ASIDE}", "w").close()
    maintain(LOCAL, root, None, grace=0)
    assert os.path.exists(f"{root}/step2.replaced")
    put(root, "step2", 2)
    assert not os.path.exists(f"{root}/step2.replaced")


def test_ls_prune_and_cp_of_such_a_root(root: str, directory: Path) -> None:
    for number in (1, 2, 3):
        put(root, f"step{number}", number, metrics={"loss": number / 10})
    plain(root, "step4", 4)
    open(f"{root}/step4/{MARK}", "w").close()
    shutil.copytree(f"{root}/step1", f"{root}/{aside_name('step0')}")
    found = {e.name: e for e in ckpttool.ls(root).entries}
    assert {n: e.whole for n, e in found.items() if not n.startswith(".")} == {
        "step1": True, "step2": True, "step3": True, "step4": False,
    }  # fmt: skip
    assert found["step3"].latest
    assert found["step2"].metrics["loss"] == 0.2
    assert "half-written" in str(found["step4"].problem)
    ckpttool.cp(f"{root}/step2", str(directory / "copy"))
    assert whole(str(directory / "copy")) == {"step2": version(2)}
    ckpttool.prune(root, keep_last=1)
    assert whole(root) == {"step3": version(3)}
    assert os.path.exists(f"{root}/step4")


def test_a_torn_checkpoint_pushes_no_whole_one_out(root: str) -> None:
    put(root, "step1", 1)
    put(root, "step2", 2)
    path = f"{root}/step2/{min(version(2))}"
    os.truncate(path, os.path.getsize(path) // 2)
    maintain(LOCAL, root, Rules(last=1), grace=0)
    assert chosen(root) == ("step1", version(1))


def test_a_metric_that_only_a_torn_checkpoint_has_does_not_end_retention(root: str) -> None:
    put(root, "step1", 1, metrics={"loss": 0.5})
    put(root, "step2", 2)
    put(root, "step3", 3)
    path = f"{root}/step1/{min(version(1))}"
    os.truncate(path, os.path.getsize(path) // 2)
    maintain(LOCAL, root, Rules(last=1, best="loss"), grace=0)
    assert whole(root).keys() == {"step3"}


def test_the_manifest_has_the_directory_of_each_archive(root: str) -> None:
    """So that a few kilobytes of a large file can be checked."""
    files: list[OutgoingFile] = [ArchiveFile("a.pt", b"\x80\x02].", {}), PlainFile("b.bin", HostPayload(b"b"))]
    save(LOCAL, root, Alone(), Request("t", 1, 2), files)
    found = read_manifest(LOCAL, f"{root}/t").files
    data = Path(root, "t", "a.pt").read_bytes()
    assert found["a.pt"].directory is not None
    start, crc = found["a.pt"].directory
    assert data[start:].startswith(b"PK\x01\x02")
    assert crc == crc32(data[start:])
    assert found["b.bin"].directory is None


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", ".metadata"])
def test_overwriting_takes_no_files_of_others(name: str, root: str) -> None:
    if name == "model.safetensors":
        plain(root, "step1", 1)
    os.makedirs(f"{root}/step1", exist_ok=True)
    Path(f"{root}/step1/{name}").write_text("mine")
    with refused(StorageError):
        put(root, "step1", 2, overwrite=True)
    assert Path(f"{root}/step1/{name}").read_text() == "mine"
