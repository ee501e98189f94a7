"""Saves into a bucket: a rank may die before or after any of its requests, and any request may fail."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

import ckpttool
from ckpttool.catalog.cleanup import maintain
from ckpttool.errors import CkptError, StorageError
from ckpttool.saving.coordination import Alone
from ckpttool.saving.files import HostPayload, PlainFile, write_files
from ckpttool.storage import MANIFEST, MARK, open_storage
from ckpttool.storage.fsspec import RemoteStorage
from ckpttool.storage.opening import open_remote
from ckpttool.storage.retry import ATTEMPTS
from ckpttool.storage.s3 import S3Storage
from ckpttool.storage.s3_client import BlockingClient, SingleAttemptFileSystem
from tests import sampling
from tests.faults.disks import Fault, Killed, Machine
from tests.faults.s3_faults import ACCESS_DENIED, INTERNAL_ERROR, SLOW_DOWN, Answer, Cut
from tests.faults.s3_proxy import Proxy
from tests.rooms import present
from tests.saving import crew
from tests.saving.checkpoints import chosen, number_of, save_version, version, whole
from tests.saving.conftest import PART_BYTES
from tests.storage import server
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.saving.coordination import Ranks
    from tests.faults.rules import Kill
    from tests.saving.crew import Outcome


class _DeadError(Exception):
    """Raised in the threads of a killed rank."""


class Requests:
    """The requests of one rank, as operations of a machine; the rank dies where a rule says so."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine = machine
        self.rank = rank
        self._fs = SingleAttemptFileSystem(
            skip_instance_cache=True, use_listings_cache=False, config_kwargs={"retries": {"total_max_attempts": 1}}
        )
        self._client = BlockingClient(self._fs)
        self._ask = self._client._ask
        self._client._ask = self._asked  # type: ignore[method-assign]

    def storage(self) -> S3Storage:
        storage = S3Storage(self._fs)
        storage.client = self._client
        return storage

    def _begin(self, name: str) -> Kill | None:
        """Count a request; return the death of the rank at it."""
        if self.rank in self.machine.dead:
            raise _DeadError
        rule = self.machine.begin(self.rank, name)
        return None if rule is None else rule.action

    def _die(self, death: Kill) -> NoReturn:
        self.machine.kill(self.rank, everyone=death.everyone)
        raise _DeadError

    def _asked(self, connected: Any, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        death = self._begin(operation)
        if death is None:
            return self._ask(connected, operation, given)
        if death.where == "after":
            with contextlib.suppress(Exception):  # the rank dies after an answer of any kind
                self._ask(connected, operation, given)
        return self._die(death)


@dataclass(frozen=True)
class Save:
    id: str
    before: tuple[tuple[str, int], ...]
    tag: str
    overwrite: bool = False


SAVES = [
    Save("anew one of several", (("step1", 1), ("step2", 2)), "step2", overwrite=True),
]
"""Makes every request that other saves make, and those that remove what is replaced."""
NEW = 5


def _work(machine: Machine, clock: crew.Clock, url: str, save: Save, requests: list[Requests]) -> list[Outcome]:
    def work(ranks: Ranks) -> None:
        place = requests[ranks.rank].storage()
        save_version(place, url, ranks, save.tag, NEW, overwrite=save.overwrite)
        if ranks.rank == 0:
            maintain(place, url, None, grace=0)
        if ranks.rank in machine.dead:
            raise Killed

    return crew.Crew(2, machine, clock).do(work)


def _state(bucket: server.Bucket, prefix: str) -> frozenset[Any]:
    pages = bucket.boto.get_paginator("list_objects_v2").paginate(Bucket=bucket.name, Prefix=prefix)
    listed = [item for page in pages for item in page.get("Contents", ())]
    uploads = [("upload", key.removeprefix(prefix)) for key, _ in bucket.uploads() if key.startswith(prefix)]
    by_chance = (MANIFEST, MARK)
    return frozenset(
        (i["Key"].removeprefix(prefix), i["Size"], "" if i["Key"].endswith(by_chance) else i["ETag"]) for i in listed
    ) | frozenset(uploads)


@pytest.mark.parametrize("save", SAVES, ids=lambda s: s.id)
def test_killed(
    save: Save, bucket: server.Bucket, monkeypatch: pytest.MonkeyPatch, crash_points: Callable[[int], None]
) -> None:
    machine, clock = Machine(), crew.Clock()
    crew.install(clock, monkeypatch)
    for tag, number in save.before:
        crew.Crew(2, machine, clock).do(
            lambda ranks, tag=tag, number=number: save_version(  # type: ignore[misc]
                open_storage(bucket.url()), bucket.url("before"), ranks, tag, number
            )
        )
    before = {k: bucket.get(k) for k in sorted(bucket.keys("before/"), key=lambda k: k.endswith("latest"))}
    assert (len(before) > 0) == (len(save.before) > 0)
    url, prefix = bucket.url("run"), "run/"
    requests = [Requests(machine, r) for r in range(2)]

    def attempt(*faults: Fault) -> list[Outcome]:
        server.forget_everything(bucket.endpoint)
        bucket.boto.create_bucket(Bucket=bucket.name)
        for key, data in before.items():
            bucket.put(key.replace("before/", prefix, 1), data)
        machine.reset(*(fault.rule() for fault in faults))
        return _work(machine, clock, url, save, requests)

    outcomes = attempt()
    assert all(o.succeeded for o in outcomes), outcomes
    assert bucket.uploads() == []
    counts = [len(machine.names[r]) for r in range(2)]
    assert min(counts) >= 5
    known: set[tuple[bool, frozenset[Any]]] = set()
    tried = 0
    for rank, count in enumerate(counts):
        every = itertools.product(range(count), ("before", "after"))
        for at, how in sampling.some(every, 4, key=f"rank {rank}"):
            outcomes = attempt(Fault(rank, at, how, everyone=at % 2 == 0))
            tried += 1
            assert rank in machine.dead, (rank, at, how)
            assert outcomes[rank].killed, (rank, at, how, outcomes)
            other = outcomes[1 - rank]
            if not other.killed and not other.succeeded:
                assert f"rank {rank} was not heard of" in str(other.error)
            key = (other.succeeded, _state(bucket, prefix))
            if key in known:
                continue
            known.add(key)
            try:
                _assert_survived(url, save, succeeded=other.succeeded)
            except (AssertionError, CkptError) as error:
                raise AssertionError(f"rank {rank} died {how} request {at}: {error}") from error
            assert bucket.uploads() == []
            assert not [k for k in bucket.sizes() if k.endswith(MARK)]
    crash_points(tried)


def _assert_survived(url: str, save: Save, *, succeeded: bool) -> None:
    found = chosen(url, open_remote(url, {}))
    olds = [number for _, number in save.before]
    if found is None:
        assert not olds
        assert not succeeded
    else:
        # A store cannot keep what is replaced: then it is the one before.
        number_of(found[1], [NEW] if succeeded else [NEW, *(olds if save.overwrite else olds[-1:])])
    before = whole(url, open_remote(url, {}))
    place = open_storage(url)
    tag = "step7" if before.keys() == {save.tag} else save.tag  # the only one cannot be replaced
    save_version(place, url, Alone(), tag, 9, overwrite=tag in before)
    maintain(place, url, None, grace=0)
    found = chosen(url, open_remote(url, {}))
    assert found is not None
    assert (found[0], number_of(found[1], [9])) == (tag, 9)
    after = whole(url, open_remote(url, {}))
    assert all(after[name] == files for name, files in before.items() if name != tag)


def test_a_denied_part_is_not_retried(bucket: server.Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = 20 * RemoteStorage.parts_at_once
    with Proxy(bucket.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.add(ACCESS_DENIED, "upload_part", times=None)
        url = bucket.url("run")
        with refused(StorageError):
            write_files(
                open_remote(url, {}), url, [PlainFile("file", HostPayload(bytes(parts * PART_BYTES)))], lambda: None
            )
        assert len(proxy.requests("upload_part")) <= 3 * RemoteStorage.parts_at_once
    assert bucket.uploads() == []


@pytest.mark.parametrize(
    "fault", [SLOW_DOWN, INTERNAL_ERROR, Cut("before"), Cut("after")], ids=["503", "500", "cut", "answer lost"]
)
def test_every_request_fails_once(
    fault: Any, bucket: server.Bucket, monkeypatch: pytest.MonkeyPatch, crash_points: Callable[[int], None]
) -> None:
    clock = crew.Clock()
    crew.install(clock, monkeypatch)
    with Proxy(bucket.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        rule = proxy.add(fault, each=True)
        url = bucket.url("run")
        storages = [open_storage(url) for _ in range(2)]
        outcomes = crew.Crew(2, Machine(), clock).do(
            lambda ranks: save_version(storages[ranks.rank], url, ranks, "step1", 1)
        )
        assert all(o.succeeded for o in outcomes), outcomes
        assert rule.fired > 10
        retried = sum(storage.retries.count for storage in storages)
        # A connection that was cut may be the HTTP client's own business.
        assert retried >= (1 if isinstance(fault, Cut) else rule.fired - 1)
        crash_points(rule.fired)
        found = chosen(url, open_remote(url, {}))
    assert found is not None
    assert number_of(found[1], [1]) == 1
    assert bucket.uploads() == []


def test_store_that_fails_for_good_is_named_on_every_rank(
    bucket: server.Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = crew.Clock()
    crew.install(clock, monkeypatch)
    with Proxy(bucket.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        name = sorted(version(1))[1]  # the second rank's
        proxy.add(INTERNAL_ERROR, "upload_part", match=name, times=None)
        url = bucket.url("run")
        outcomes = crew.Crew(2, Machine(), clock).do(
            lambda ranks: save_version(open_storage(url), url, ranks, "step1", 1)
        )
        errors = {str(o.error) for o in outcomes}
        assert len(errors) == 1, errors
        error = errors.pop()
        assert f"was not saved: rank 1: {url}/step1/{name}: the store failed {ATTEMPTS} times" in error
        assert error.endswith("nothing was committed")
    assert bucket.uploads() == []
    assert [k for k in bucket.keys("run/") if "/step1/" in k] == []


@pytest.mark.parametrize("beside", [*["thin"] * present("thinning"), "none", "a file is missing", "a file is cut off"])
def test_only_checkpoint_to_resume_from_is_not_replaced(beside: str, bucket: server.Bucket) -> None:
    url = bucket.url("run")
    if beside != "none":
        save_version(open_storage(url), url, Alone(), "step0", 0)
    save_version(open_storage(url), url, Alone(), "step1", 1)
    states = [key for key in bucket.keys("run/step0/") if key.endswith("optim_states.pt")]
    if beside == "thin":
        ckpttool.prune(url, keep_last=1, thin="bf16")
    elif beside == "a file is missing":
        open_storage(url).delete([bucket.url(states[0])])
    elif beside == "a file is cut off":
        bucket.put(states[0], bucket.get(states[0])[:-100])
    before = {key: bucket.get(key) for key in bucket.keys("run/step1/")}
    with refused(StorageError):
        save_version(open_storage(url), url, Alone(), "step1", 2, overwrite=True)
    assert {key: bucket.get(key) for key in bucket.keys("run/step1/")} == before
    found = chosen(url, open_remote(url, {}))
    assert found is not None
    assert number_of(found[1], [1]) == 1


def test_full_bucket(bucket: server.Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with Proxy(bucket.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.add(Answer(403, "QuotaExceeded"), "put_object", times=None)
        url = bucket.url("run")
        with refused(StorageError):
            save_version(open_storage(url), url, Alone(), "step1", 1)
