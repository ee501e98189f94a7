"""Every command between all storages: the same output and messages as on local disk."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.torch import load

import ckpttool
from ckpttool.cli import _output
from tests import sampling
from tests.cli.command import EXTENSIONS_READING
from tests.cli.command import ckpttool as command
from tests.rooms import present
from tests.storage import places, server
from tests.storage.places import files_in
from tests.truth import NAMES, REPRESENTATIVE, source, truth
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.storage.places import Place
    from tests.storage.server import Bucket

NAME, OTHER = "zero3-dp2-bf16", "zero3-dp4-bf16"
PAIRS = [
    ("local", "s3"), ("s3", "local"), ("s3", "s3"), ("memory", "s3"), ("s3", "memory"), ("memory", "memory"),
    ("local", "memory"), ("memory", "local"),
    *(pair for other in places.OTHERS for pair in (("local", other), (other, "local"), (other, other))),
]  # fmt: skip
"""Where from and where to. From local disk to local disk is what the rest of the tests are about."""


WRITES: dict[str, tuple[Any, dict[str, Any]]] = {
    "safetensors": (ckpttool.consolidate, {"to": "safetensors"}),
    "safetensors-bf16-shards": (ckpttool.consolidate, {"to": "safetensors", "dtype": "bf16", "max_shard_size": 3000}),
    "safetensors-proved": (ckpttool.consolidate, {"to": "safetensors", "prove": True, "max_shard_size": 10_000}),
    "torch": (ckpttool.consolidate, {"to": "torch"}),
    "torch-fp16-shards": (ckpttool.consolidate, {"to": "torch", "dtype": "fp16", "max_shard_size": 3000}),
    "zero": (ckpttool.convert, {"to": "zero", "world_size": 3, "stage": 2}),
    "zero-proved": (ckpttool.convert, {"to": "zero", "world_size": 1, "prove": True}),
    "universal": (ckpttool.convert, {"to": "universal"}),
    "dcp": (ckpttool.convert, {"to": "dcp", "prove": True}),
    "dcp-of-accelerate": (ckpttool.convert, {"to": "dcp", "layout": "accelerate"}),
}
if present("rank_files"):
    WRITES["files-of-ranks"] = (
        ckpttool.convert,
        {"to": "ranks", "layout": "verl", "world_size": 3, "prove": True},
    )


@functools.cache
def written_locally(kind: str, name: str = NAME) -> dict[str, bytes]:
    """The files that the same command writes on local disk from there."""
    function, options = WRITES[kind]
    with tempfile.TemporaryDirectory() as directory:
        out = os.path.join(directory, "out")
        function(source(name), out, **options)
        return files_in(out)


@pytest.mark.parametrize(
    ("kind", "pair"),
    [(k, p) for k in WRITES for p in (sampling.some(PAIRS, 5 if k == "safetensors-bf16-shards" else 1, key=k))],
    ids=lambda v: v if isinstance(v, str) else "-to-".join(v),
)
def test_the_same_bytes_are_written(kind: str, pair: tuple[str, str], request: pytest.FixtureRequest) -> None:
    src, out = (places.place(p, request) for p in pair)
    function, options = WRITES[kind]
    target = out.new()
    stored = src.put(source(NAME))
    assert not function(stored, target, **options).written.there
    assert out.files(target) == written_locally(kind)
    assert function(stored, target, resume=True, **options).written.there
    assert out.files(target) == written_locally(kind)
    if "s3" in pair:
        assert request.getfixturevalue("s3").uploads() == []


@pytest.mark.parametrize(
    "name", sampling.some([n for n in REPRESENTATIVE if n not in {NAME, "pipeline-zero0-pp2-dp2-fp16"}], 2)
)
def test_the_same_bytes_are_written_of_each_layout(name: str, s3: Bucket) -> None:
    place = places.Remote(s3)
    function, options = WRITES["universal"]
    out = place.new()
    function(place.put(source(name)), out, **options)
    assert place.files(out) == written_locally("universal", name)


def test_written_values_equal_the_state_of_the_engine(place: Place) -> None:
    import torch

    out = place.new()
    ckpttool.consolidate(place.put(source(NAME)), out, to="safetensors")
    found = load(place.files(out)["model.safetensors"])
    expected = truth(NAME).state_dict(torch.float32)
    assert {n for n in found if n in expected} == set(found)
    assert all(torch.equal(found[n], expected[n]) for n in found)


def test_there_and_back_again_is_the_same(place: Place) -> None:
    src = place.put(source(NAME))
    digest = ckpttool.digest(source(NAME))
    for to, back in sampling.some(
        [("zero", "dcp"), ("universal", "zero")], 1 if isinstance(place, places.Remote) else 2
    ):
        there, again = place.new(), place.new()
        ckpttool.convert(src, there, **_target(to))
        assert ckpttool.digest(there) == digest
        ckpttool.convert(there, again, **_target(back))
        assert ckpttool.digest(again) == digest
        assert ckpttool.verify(again, deep=True).findings == ()


def _target(to: str) -> dict[str, Any]:
    return {"to": to, "world_size": 2, "stage": 3} if to == "zero" else {"to": to}


# ------------------------------------------------------------------------------------------------- reading


def _layout(src: str) -> Any:
    """What inspect says, but for where and when."""
    done = command("inspect", src, "--json", "--params")
    assert (done.code, done.stderr) == (0, "")
    return _placeless(json.loads(done.stdout.replace(src.rstrip("/"), "PLACE")))


def _placeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _placeless(v) for k, v in value.items() if k not in {"modified", "version"}}
    return [_placeless(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", sampling.some(NAMES, 10))
def test_every_kind_is_read_from_memory(name: str) -> None:
    src = places.Memory().put(source(name))
    assert ckpttool.digest(src) == ckpttool.digest(source(name))
    assert _layout(src) == _layout(source(name))


@pytest.mark.parametrize("name", sampling.some(REPRESENTATIVE, 3))
def test_each_layout_is_read_from_a_bucket(name: str, s3: Bucket) -> None:
    src = places.Remote(s3).put(source(name))
    assert ckpttool.digest(src) == ckpttool.digest(source(name))
    assert _layout(src) == _layout(source(name))


def _said(*arguments: str, src: str) -> str:
    done = command(*arguments)
    assert (done.code, done.stderr) == (0, ""), done
    return re.sub(r"\d+\.\d+ s\b", "TIME", done.stdout.replace(src, "PLACE"))


@pytest.mark.parametrize(
    "arguments",
    [["verify"], ["verify", "--deep"], *([name] for name in EXTENSIONS_READING), ["digest"]],
    ids=" ".join,
)
def test_commands_say_the_same(arguments: list[str], place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_output, "SECONDS_BETWEEN_LINES", 1e9)  # how long they take is no part of it
    here, there = source(NAME), place.put(source(NAME))
    first = _said(arguments[0], there, *arguments[1:], src=there)
    second = _said(arguments[0], here, *arguments[1:], src=here)
    assert re.sub(r"[─-╿ ]+", " ", first) == re.sub(r"[─-╿ ]+", " ", second)


def _entries(root: str) -> str:
    found = [(e.name, e.whole, e.torn, e.problem) for e in ckpttool.ls(root).entries]
    return str(found).replace(root, "PLACE")


@pytest.mark.parametrize("kind", ["zero", "universal", "dcp", "safetensors-bf16-shards"])
def test_a_missing_file_is_the_same_everywhere(kind: str, place: Place, tmp_path: Path) -> None:
    """``prune --torn`` removes checkpoints that lack files."""
    write, how = WRITES[kind]
    write(source(NAME), tmp_path / "run" / "checkpoint-1", **how)
    for file in sampling.some(sorted(p for p in (tmp_path / "run").rglob("*") if p.is_file()), 5, key=kind):
        data = file.read_bytes()
        file.unlink()
        assert _entries(place.put(tmp_path / "run")) == _entries(str(tmp_path / "run")), file
        file.write_bytes(data)


def test_diff_reads_two_places(place: Place, tmp_path: Path) -> None:
    src = place.put(source(NAME))
    assert ckpttool.diff(src, source(NAME)).equal
    assert ckpttool.diff(source(NAME), src).equal
    other = ckpttool.diff(src, source(OTHER))
    assert other.equal == ckpttool.diff(source(NAME), source(OTHER)).equal
    assert command("diff", src, source(NAME)).code == 0


def test_extract_reads_and_writes(place: Place) -> None:
    src = place.put(source(NAME))
    checkpoint = ckpttool.inspect(src)
    name = next(p.name for p in checkpoint.parameters if len(p.shape) == 2)
    whole = ckpttool.extract(src, name)
    assert whole.tobytes() == ckpttool.extract(source(NAME), name).tobytes()
    np.testing.assert_array_equal(ckpttool.extract(checkpoint, name, index=np.s_[1:3, 1:]), whole[1:3, 1:])
    for ending in ("npy", "safetensors", "pt"):
        out = place.new() + f".{ending}"
        assert command("extract", src, name, out).code == 0
        again = command("extract", src, name, out)
        assert again.error.endswith("exists already; choose another name, or pass --overwrite")
        assert command("extract", src, name, out, "--overwrite").code == 0
        assert ckpttool.inspect(out).parameters if ending == "safetensors" else True


def test_single_files_and_shards_are_read(place: Place, tmp_path: Path) -> None:
    digests = set()
    for number, (to, limit) in enumerate([("safetensors", "5GB"), ("safetensors", 3000), ("torch", 3000)]):
        out = str(tmp_path / f"out{number}")
        ckpttool.consolidate(source(NAME), out, to=to, max_shard_size=limit)  # type: ignore[arg-type]
        url = place.put(out)
        digests.add(ckpttool.digest(url).weights)
        assert ckpttool.verify(url, deep=True).findings == ()
        if limit == "5GB":
            digests.add(ckpttool.digest(f"{url}/model.safetensors").weights)
    assert len(digests) == 1


def test_a_mixture_of_two_saves_is_refused_and_leaves_nothing(place: Place, tmp_path: Path) -> None:
    import shutil

    import torch

    mixed = tmp_path / "mixed"
    shutil.copytree(source("zero2-dp2-bf16"), mixed)
    path = next(mixed.rglob("mp_rank_00_model_states.pt"))
    state = torch.load(path, weights_only=False)
    name = next(n for n, t in state["module"].items() if t.ndim == 2)
    state["module"][name].view(-1)[0] += 1
    torch.save(state, path)
    out = place.new()
    with refused(ckpttool.LayoutError):
        ckpttool.consolidate(place.put(mixed), out, to="safetensors")
    assert place.files(out) == {}


# ------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("prefix", ["a b/ü/日本/1+1=2/50%/%20", "a&b;c/x#y/it's/(1)/~a!b*"])
def test_any_name_will_do(prefix: str, place: Place, request: pytest.FixtureRequest) -> None:
    base = place.new() + f"/{prefix}"
    if isinstance(place, places.Local):
        os.makedirs(base)
    src, out, again = f"{base}/zero", f"{base}/out", f"{base}/out2"
    ckpttool.convert(source("zero1-dp1-bf16"), src, to="zero", world_size=2)
    assert "latest" in place.files(src)
    ckpttool.consolidate(src, out, to="safetensors", max_shard_size=3000, prove=True)
    ckpttool.consolidate(source("zero1-dp1-bf16"), again, to="safetensors", max_shard_size=3000)
    assert place.files(out) == place.files(again)
    assert ckpttool.digest(out).weights == ckpttool.digest(source("zero1-dp1-bf16")).weights


def test_a_bucket_itself_is_a_root(s3: Bucket) -> None:
    ckpttool.convert(source(NAME), s3.url().rstrip("/"), to="zero", world_size=2, stage=3)
    assert s3.get("latest") == b"global_step3"
    for url in (s3.url(), s3.url().rstrip("/")):
        assert ckpttool.digest(url) == ckpttool.digest(source(NAME))
        assert ckpttool.inspect(url).tag == "global_step3"
    error = command("convert", source(NAME), s3.url(), "--to", "universal").error
    assert error.endswith("already exists and is not empty; choose another OUT")


@pytest.mark.parametrize("spelling", ["s3a://", "S3://", "s3://"])
def test_spellings_of_a_scheme(spelling: str, s3: Bucket) -> None:
    places.Remote(s3).put(source(NAME))
    s3.upload(Path(source(NAME)), "run")
    url = f"{spelling}{s3.name}/run"
    assert ckpttool.digest(url) == ckpttool.digest(source(NAME))
    out = f"{spelling}{s3.name}/out"
    ckpttool.consolidate(url, out, to="safetensors")
    assert places.Remote(s3).files(s3.url("out")) == written_locally("safetensors")


def test_a_trailing_slash_changes_nothing(place: Place) -> None:
    src = place.put(source(NAME))
    assert ckpttool.digest(src + "/") == ckpttool.digest(src)
    out = place.new()
    ckpttool.consolidate(src + "/", out + "/", to="safetensors")
    assert place.files(out) == written_locally("safetensors")


def test_urls_of_local_files(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/a%20b"
    ckpttool.consolidate(f"file://{source(NAME)}", url, to="safetensors", prove=True)
    assert files_in(tmp_path / "a b") == written_locally("safetensors")
    assert ckpttool.digest(url) == ckpttool.digest(str(tmp_path / "a b"))
    assert ckpttool.digest(f"file://localhost{tmp_path}/a%20b") == ckpttool.digest(url)


def test_markers_of_directories_are_no_files(s3: Bucket) -> None:
    """Consoles leave an empty object for each directory that is made by hand."""
    place = places.Remote(s3)
    src = place.put(source("universal-zero3-dp2-bf16"))
    prefix = src.removeprefix(s3.url())
    directories = {key.rpartition("/")[0] for key in s3.keys(prefix)}
    for directory in {d[: d.index("/", len(prefix)) if "/" in d[len(prefix) :] else None] for d in directories}:
        s3.put(f"{directory}/", b"")
    for directory in directories:
        s3.put(f"{directory}/", b"")
    assert ckpttool.digest(src) == ckpttool.digest(source("universal-zero3-dp2-bf16"))
    assert ckpttool.verify(src, deep=True).findings == ()
    s3.put("made/by/hand/", b"")
    ckpttool.convert(src, s3.url("made/by/hand"), to="zero", world_size=2)
    assert ckpttool.digest(s3.url("made/by/hand")) == ckpttool.digest(src)


@pytest.fixture
def short_pages(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket on a server whose listings have pages of 20 objects, where S3 has 1000."""
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "20")
    with server.running() as endpoint, contextlib.closing(server.client(endpoint)) as client:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        client.create_bucket(Bucket=s3.name)
        yield server.Bucket(endpoint, s3.name, client)


def test_a_directory_of_several_pages(short_pages: Bucket) -> None:
    """A listing of several pages, with the files of the checkpoint on the last."""
    src = places.Remote(short_pages).put(source(NAME))
    prefix = src.removeprefix(short_pages.url())
    for number in range(50):
        short_pages.put(f"{prefix}/aaa{number}", b"")
    assert short_pages.boto.list_objects_v2(Bucket=short_pages.name)["IsTruncated"]
    assert ckpttool.digest(src) == ckpttool.digest(source(NAME))


def test_each_node_may_have_its_own_bucket(s3: Bucket, tmp_path: Path) -> None:
    """Each holds the files of some ranks. Nothing but these is listed, however much lies beside."""
    other = f"{s3.name}-other"
    s3.boto.create_bucket(Bucket=other)
    for key, path in ((p.relative_to(source(NAME)).as_posix(), p) for p in _files(source(NAME))):
        bucket = other if "rank_1" in key or "rank_3" in key else s3.name
        s3.boto.upload_file(str(path), bucket, f"node/{key}")
    s3.boto.upload_file(os.path.join(source(NAME), "latest"), other, "node/latest")
    found = ckpttool.digest([s3.url("node"), f"s3://{other}/node"])
    assert found == ckpttool.digest(source(NAME))


def _files(directory: str) -> list[Path]:
    return sorted(p for p in Path(directory).rglob("*") if p.is_file())


@pytest.mark.parametrize("out", ["run", "run/", "", "/"])
def test_nothing_is_written_over_its_source(out: str, s3: Bucket) -> None:
    s3.upload(Path(source(NAME)), "run")
    before = s3.sizes()
    for scheme in ("s3", "s3a"):
        done = command("consolidate", s3.url("run"), f"{scheme}://{s3.name}/{out}", "--to", "torch", "--overwrite")
        assert "would be written over the checkpoint in " in done.error
    assert s3.sizes() == before


def test_a_sibling_directory_of_the_source_is_not_the_source(s3: Bucket) -> None:
    s3.upload(Path(source(NAME)), "run-1")
    ckpttool.consolidate(s3.url("run-1"), s3.url("run"), to="torch")
    ckpttool.consolidate(s3.url("run-1"), s3.url("run-12"), to="torch")
