"""Small files that demand much memory or time are refused, in proportion to their size."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from ckpttool.budget import CHUNKS, MEMORY, Budget, opening, spend
from ckpttool.catalog.entries import _numbers
from ckpttool.containers import safetensors
from ckpttool.errors import ContainerError
from ckpttool.formats.zero.files import parse_name
from tests.cli.command import EXTENSIONS_READING
from tests.cli.command import ckpttool as command
from tests.damage import edit_model
from tests.hostile import BytesReader
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SECONDS = 10
NBYTES = 500 << 20


@pytest.fixture(autouse=True)
def _within_limits() -> Iterator[None]:
    tracemalloc.start()
    began = time.process_time()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - began < SECONDS
    assert peak < NBYTES


def _header(header: object) -> BytesReader:
    text = json.dumps(header).encode()
    return BytesReader(len(text).to_bytes(8, "little") + text, "model.safetensors")


@pytest.mark.slow
def test_shape_of_many_dimensions_is_refused() -> None:
    reader = _header({"a": {"dtype": "F32", "shape": [1 << 61] * 240_000, "data_offsets": [0, 4]}})
    with refused(ContainerError):
        safetensors.parse(reader)


def test_metadata_that_is_no_text_is_no_bug(tmp_path: Path) -> None:
    reader = _header({"__metadata__": {"a": [], "b": "c"}})
    assert safetensors.parse(reader) == ({}, {"b": "c"})
    (tmp_path / "model.safetensors").write_bytes(reader.data)
    for name in ("inspect", "verify", *EXTENSIONS_READING):
        assert command(name, tmp_path).code in {0, 1, 3}


def test_rank_of_a_name_does_not_take_memory(checkpoint_copy: Callable[[str], Path]) -> None:
    assert parse_name("zero_pp_rank_999999_mp_rank_00_optim_states.pt") is not None
    for name in (
        "zero_pp_rank_9999999999_mp_rank_00_optim_states.pt",
        "expp_rank_9999999999_mp_rank_00_optim_states.pt",
        "layer_9999999999_expert_9999999999_mp_rank_9999999999_model_states.pt",
        f"mp_rank_{'9' * 5000}_model_states.pt",
    ):
        assert parse_name(name) is None
    root = checkpoint_copy("zero2-dp2-bf16")
    for name in ("expp_rank_999999_mp_rank_00_optim_states.pt", "expp_rank_9999999999_mp_rank_00_optim_states.pt"):
        (root / "global_step3" / name).touch()
    for arguments in (("inspect", root), ("verify", root), ("ls", root)):
        assert command(*arguments).code in {0, 1, 3}


@pytest.mark.slow
def test_nested_client_state_is_not_visited_again_and_again(checkpoint_copy: Callable[[str], Path]) -> None:
    inner: dict[str, object] = {"x": "no number"}
    for _ in range(8):
        inner = {f"{n}": inner for n in range(300)}
    assert _numbers(inner) == {}
    assert _numbers({"k" * 10_000: {"a": 1.0}, "b": {"c": 2}}) == {"b.c": 2.0}
    root = checkpoint_copy("zero2-dp2-bf16")
    edit_model(root, lambda s: s.update(nested=inner))
    assert command("ls", root).code == 0
    assert command("prune", root, "--keep-last", "1").code == 0


def test_a_manifest_too_large_for_its_files_is_refused(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    with (root / "global_step3/ckpttool.json").open("w") as file:
        file.write('{"a": [' + "[]," * 10_000_000 + "[]]}")
    for arguments in (("inspect", root), ("verify", root), ("ls", root)):
        done = command(*arguments)
        assert ": needs more than" in done.stdout + done.stderr


def test_budget_grows_with_the_files() -> None:
    small, large = Budget(), Budget()
    for _ in range(2):  # a file counts once
        large.note_file("a", 1 << 40)
    large.note_file("a", 1 << 10)  # a part of it
    assert small.left(MEMORY) == MEMORY.base
    assert large.left(MEMORY) == MEMORY.base + MEMORY.per_byte * (1 << 40)
    with refused(ContainerError):
        small.spend(CHUNKS, CHUNKS.base + 1, "run/.metadata")
    large.spend(CHUNKS, CHUNKS.base + 1, "run/.metadata")


def test_budget_is_shared_by_all_of_an_open_and_by_nothing_else() -> None:
    spend(CHUNKS, 1e30, "nothing is opened")
    with opening() as outer, opening() as inner:
        assert inner is outer
        with pytest.raises(ContainerError):
            spend(CHUNKS, 1e30, "x")
