"""A layout or a plan names its storage as data: it pickles without connections."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import TYPE_CHECKING

import pytest

import ckpttool
from ckpttool.formats import open_checkpoint
from ckpttool.plan.builder import source_files
from ckpttool.storage import LOCAL, LOCAL_SPEC, connect, open_storage
from ckpttool.storage.confined import ConfinedStorage
from ckpttool.storage.fsspec import RemoteStorage
from tests.truth import source

if TYPE_CHECKING:
    from tests.storage.server import Bucket

ZERO2 = "zero2-dp2-bf16"


def _again(value: object) -> object:
    return pickle.loads(pickle.dumps(value))


def test_local_disk_is_the_same_storage_in_every_process() -> None:
    assert connect(LOCAL_SPEC) is LOCAL
    assert connect(_again(LOCAL_SPEC)) is LOCAL  # type: ignore[arg-type]


def test_opened_again_a_confined_storage_has_the_same_bases() -> None:
    storage = ConfinedStorage(("/one", "/two"))
    again = connect(_again(storage.spec))  # type: ignore[arg-type]
    assert isinstance(again, ConfinedStorage)
    assert again.bases == storage.bases


def test_bucket(s3: Bucket) -> None:
    url = f"s3://{s3.name}/run"
    ckpttool.cp(source(ZERO2), url)
    checkpoint = open_checkpoint(url)
    live = connect(checkpoint.storage)
    assert isinstance(live, RemoteStorage)
    assert connect(checkpoint.storage) is live
    data = pickle.dumps((checkpoint, source_files(checkpoint)))
    assert all(file.storage is checkpoint.storage for file in source_files(checkpoint))
    there, files = pickle.loads(data)
    assert all(file.storage is there.storage for file in files)
    again = connect(there.storage)
    assert again is not live
    assert isinstance(again, type(live))
    assert again.fs.storage_options == live.fs.storage_options
    assert again.open(there.path(0)).read(0, 4) == live.open(checkpoint.path(0)).read(0, 4)


def test_a_storage_closes_with_the_last_layout_that_names_it() -> None:
    storage = open_storage("memory://x")
    spec = storage.spec
    assert storage.spec is spec
    alive = weakref.ref(storage)
    del storage
    gc.collect()
    assert connect(spec) is alive()
    del spec
    gc.collect()
    assert alive() is None


def test_the_retries_of_the_user_stay() -> None:
    s3fs = pytest.importorskip("s3fs")
    theirs = s3fs.S3FileSystem(use_listings_cache=False, key="k", secret="s")  # noqa: S106
    before = theirs.retries
    ours = open_storage("s3://bucket/run", {"key": "k", "secret": "s"})
    assert isinstance(ours, RemoteStorage)
    assert ours.fs.retries == 1
    assert theirs.retries == before > 1
