"""Every storage of ckpttool has the properties that the save protocol and the executors need."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

from ckpttool.storage import LOCAL, open_storage
from ckpttool.testing import ConditionalWrites, StorageTests

if TYPE_CHECKING:
    from pathlib import Path

    from ckpttool.storage import WritableStorage
    from tests.storage.server import Bucket


class TestLocal(ConditionalWrites):
    @pytest.fixture
    def storage(self) -> WritableStorage:
        return LOCAL

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path / "a" / "root")


class TestS3(ConditionalWrites):
    @pytest.fixture
    def root(self, s3: Bucket) -> str:
        return s3.url("run")

    @pytest.fixture
    def storage(self, root: str) -> WritableStorage:
        return open_storage(root)


class TestAnyFsspec(StorageTests):
    hides_unfinished = False  # fsspec's memory does not

    @pytest.fixture
    def root(self) -> str:
        return f"memory://{uuid.uuid4().hex}/run"

    @pytest.fixture
    def storage(self, root: str) -> WritableStorage:
        return open_storage(root)
