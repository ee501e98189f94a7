"""Storages to read from and to write to, filled and inspected without the code under test."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import fsspec

if TYPE_CHECKING:
    import pytest

    from tests.storage.server import Bucket


class Place(Protocol):
    """One storage."""

    def new(self) -> str:
        """A path or URL at which nothing is."""

    def put(self, directory: str | Path) -> str:
        """Copy a directory there; its path or URL."""

    def files(self, where: str) -> dict[str, bytes]:
        """All files below a path or URL, by their relative names."""


class Local:
    """A directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def new(self) -> str:
        return str(self._directory / uuid.uuid4().hex)

    def put(self, directory: str | Path) -> str:
        return str(directory)  # nothing writes there

    def files(self, where: str) -> dict[str, bytes]:
        return files_in(where)


class Remote:
    """A bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def new(self) -> str:
        return self._bucket.url(f"{uuid.uuid4().hex}/run")

    def put(self, directory: str | Path) -> str:
        url = self.new()
        self._bucket.upload(Path(directory), self._key(url))
        return url

    def files(self, where: str) -> dict[str, bytes]:
        prefix = f"{self._key(where)}/"
        return {k.removeprefix(prefix): self._bucket.get(k) for k in self._bucket.keys(prefix)}

    def _key(self, url: str) -> str:
        return url.removeprefix(self._bucket.url())


OTHERS = os.environ.get("CKPTTOOL_TEST_URLS", "").split()
"""Buckets of the tester's, of whatever storage fsspec reaches: "gs://bucket/path az://container"."""


class Elsewhere:
    """A storage that fsspec reaches.

    Args:
        url: Below which the tests may write. They remove nothing.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._fs = fsspec.core.url_to_fs(url, use_listings_cache=False)[0]

    def new(self) -> str:
        return f"{self._url}/{uuid.uuid4().hex}/run"

    def put(self, directory: str | Path) -> str:
        url = self.new()
        for name, data in files_in(directory).items():
            self._fs.pipe_file(self._fs._strip_protocol(f"{url}/{name}"), data)
        return url

    def files(self, where: str) -> dict[str, bytes]:
        root = self._fs._strip_protocol(where)
        return {k.removeprefix(f"{root}/"): self._fs.cat_file(k) for k in self._fs.find(root)}


class Memory(Elsewhere):
    """fsspec's own."""

    def __init__(self) -> None:
        super().__init__("memory://memory")


def files_in(directory: str | Path) -> dict[str, bytes]:
    """All files of a directory, by their relative names."""
    root = Path(directory)
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def place(kind: str, request: pytest.FixtureRequest) -> Place:
    """A storage by its name, "local", "memory" or "s3", or by its URL."""
    if "://" in kind:
        return Elsewhere(kind)
    if kind == "s3":
        return Remote(request.getfixturevalue("s3"))
    return Memory() if kind == "memory" else Local(request.getfixturevalue("tmp_path"))
