"""A rank that is late or differs is named on all ranks, in time, before any engine changes."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import ckpttool
from ckpttool import CheckpointManager
from tests import forked
from tests.deepspeed.engines import build, differing, held, logged, refusal, step, told
from tests.forked import on_ranks

if TYPE_CHECKING:
    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed

TIMEOUT = 3.0
"""Seconds that a rank may be late;"""
LATE = 6.0
"""and those that it is, where it is too late."""
SLACK = 10.0
"""Seconds that a busy machine may take."""
TOLD = {
    "metric": ("ArgumentError: metrics: rank 1: are not a mapping",) * 2,
    "metric in the background": ("ArgumentError: metrics: rank 1: are not a mapping",) * 2,
    "tag": ("rank 0 has tag 't0', rank 1 has 't1'",) * 2,
    "bad tag": ("ArgumentError: tag: rank 1: cannot be '../t'",) * 2,
    "client state": ("ArgumentError: client_state: rank 1: is a list",) * 2,
    "overwrite": ("rank 0 has overwrite False, rank 1 has True",) * 2,
    "engine": ("ArgumentError: engine: rank 1: is of class NoneType",) * 2,
    "root": ("rank 0 has root ",) * 2,
    "weights only": ("rank 0 has weights_only True, rank 1 has False",) * 2,
    "strict": ("rank 0 has strict False, rank 1 has True",) * 2,
    "restored tag": ("rank 0 has tag None, rank 1 has 'good'",) * 2,
    "restored engine": ("ArgumentError: engine: rank 1: is of class NoneType",) * 2,
    "source": ("StorageError: nowhere://root: rank 1: nowhere:// is not a known storage",) * 2,
    "no source": ("ArgumentError: src: rank 1: ",) * 2,
    "memory": ("ArgumentError: memory: rank 1: is 'much'",) * 2,
    "other model": ("fits the engine of rank 0 (native) and of rank 1 (planned) in different ways; build the same",)
    * 2,
    "no memory to save": ("could not be checked: MemoryError: none left",) * 2,
    "no memory to restore": ("rank 1: MemoryError: none left",) * 2,
    "late save": ("rank 1 was not heard of in time",) * 2,
    "late restore": ("rank 1 was not heard of in time",) * 2,
    "late preview": ("rank 1 was not heard of in time",) * 2,
    "late load": ("rank 1 was not heard of in time",) * 2,
    "url": ("rank 1 was not heard of in time", "StorageError: nowhere://root"),
}
GATHERS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
LEFT_OUT = {
    "left out by the second": ("rank 1 was not heard of in time; call this on every rank", ""),
    "save after it": ("", ""),
    "left out by the first": ("", "rank 0 was not heard of for 23 s; call this on every rank"),
    "restore after it": ("", ""),
}
"""Two calls that one rank did not make, each followed by one that both make."""


@on_ranks(2)
def _calls(directory: Path) -> dict[str, Any]:
    """What each rank hears, where one of them is late, fails, or passes other arguments."""
    rank = torch.distributed.get_rank()
    second = rank == 1
    engine = build(2, "bf16", "two", "adamw")
    step(engine, 1)
    root = str(directory / "root")
    manager: Any = CheckpointManager(root, timeout=TIMEOUT)
    with mock.patch.multiple(torch.distributed, **dict.fromkeys(GATHERS, mock.DEFAULT)) as gathers:
        manager.save(engine, tag="older")
    gathered = [name for name, function in gathers.items() if function.called]
    step(engine, 1)
    manager.save(engine, tag="good", client_state={"n": 1})
    step(engine, 1)
    before = held(engine)

    def late(function: Any) -> None:
        if second:
            time.sleep(LATE)
        function()

    def short_of_memory(where: str, function: Any) -> None:
        fails = mock.patch(f"ckpttool.integrations.{where}", side_effect=MemoryError("none left"))
        with fails if second else contextlib.nullcontext():
            function()

    def with_a_buffer_more() -> None:
        if second:
            engine.module.register_buffer("more", torch.ones(1))
        try:
            ckpttool.load(engine, root, strict=False, timeout=TIMEOUT)
        finally:
            engine.module._buffers.pop("more", None)

    def from_elsewhere() -> None:
        made: Any = CheckpointManager(root if not second else "nowhere://root", timeout=TIMEOUT)
        made.save(engine, tag="t")

    background: Any = CheckpointManager(root, timeout=TIMEOUT, async_save=True)
    other: Any = CheckpointManager(str(directory / f"root-{rank}"), timeout=TIMEOUT)
    asked: dict[str, Any] = {
        "metric": lambda: manager.save(engine, tag="t", metrics={"loss": None if second else 0.5}),
        "metric in the background": lambda: background.save(engine, tag="t", metrics={"loss": None if second else 0.5}),
        "tag": lambda: manager.save(engine, tag=f"t{rank}"),
        "bad tag": lambda: manager.save(engine, tag="../t" if second else "t"),
        "client state": lambda: manager.save(engine, tag="t", client_state=[1] if second else {}),
        "overwrite": lambda: manager.save(engine, tag="good", overwrite=second),
        "engine": lambda: manager.save(None if second else engine, tag="t"),
        "root": lambda: other.save(engine, tag="t"),
        "weights only": lambda: manager.restore(engine, weights_only=not second),
        "strict": lambda: manager.restore(engine, strict=second, dry_run=True),
        "restored tag": lambda: manager.restore(engine, tag="good" if second else None),
        "restored engine": lambda: manager.restore(None if second else engine),
        "source": lambda: ckpttool.load(engine, "nowhere://root" if second else root, timeout=TIMEOUT),
        "no source": lambda: ckpttool.load(engine, [] if second else root, dry_run=True, timeout=TIMEOUT),
        "memory": lambda: ckpttool.load(engine, root, memory="much" if second else None, timeout=TIMEOUT),
        "other model": with_a_buffer_more,
        "no memory to save": lambda: short_of_memory("live.files.unpickle", lambda: manager.save(engine, tag="t")),
        "no memory to restore": lambda: short_of_memory("deepspeed.load.match", lambda: manager.restore(engine)),
        "late save": lambda: late(lambda: manager.save(engine, tag="t")),
        "late restore": lambda: late(lambda: manager.restore(engine)),
        "late preview": lambda: late(lambda: manager.restore(engine, dry_run=True)),
        "late load": lambda: late(lambda: ckpttool.load(engine, root, timeout=TIMEOUT)),
        "url": from_elsewhere,
        "left out by the second": lambda: None if second else manager.save(engine, tag="t"),
        "save after it": lambda: manager.save(engine, tag="after-second") and None,
        "left out by the first": lambda: manager.save(engine, tag="t") if second else None,
        "restore after it": lambda: manager.restore(engine, tag="after-second") and None,
    }
    found: dict[str, Any] = {"gathered": gathered}
    for mode in ("Warn", "IGNORE", "fail"):
        engine._config._param_dict["checkpoint"] = {"tag_validation": mode}
        with logged(logging.WARNING) as lines:
            text = refusal(lambda mode=mode: manager.save(engine, tag=f"{mode}-{rank}"))  # type: ignore[misc]
        found[mode] = text, lines, sorted(p.name for p in Path(root).glob(f"{mode}-*"))
        torch.distributed.barrier()
    del engine._config._param_dict["checkpoint"]
    for name, function in asked.items():
        forked.end_if_stuck(90)
        began = time.monotonic()
        text = told(function)
        found[name] = text, time.monotonic() - began, differing(before, held(engine)) == []
        torch.distributed.barrier()
    if second:
        CheckpointManager(root)  # which meets nobody
    last: Any = CheckpointManager(root, timeout=20)
    last.save(engine, tag="after")
    found["after"] = last.restore(engine), differing(before, held(engine))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: TempPathFactory) -> list[dict[str, Any]]:
    return _calls(tmp_path_factory.mktemp("agreeing"))


@pytest.mark.parametrize("what", TOLD)
def test_one_rank_alone(what: str, found: list[dict[str, Any]]) -> None:
    for rank, expected in enumerate(TOLD[what]):
        text, seconds, untouched = found[rank][what]
        assert expected in text
        assert "\n" not in text
        assert untouched
        is_late = what.startswith("late") or what == "url"
        assert seconds < (max(LATE, TIMEOUT) if is_late else 0) + SLACK


def test_a_call_that_one_rank_left_out_does_not_disturb_the_next(found: list[dict[str, Any]]) -> None:
    for what, expected in LEFT_OUT.items():
        for rank, text in enumerate(expected):
            said, seconds, _ = found[rank][what]
            assert text in said if text else not said
            assert text or seconds < SLACK


def test_tags_that_differ_are_treated_as_the_configuration_says(found: list[dict[str, Any]]) -> None:
    warning = "rank 1 has tag Warn-1: the save uses rank 0's, Warn-0"
    assert [one["Warn"] for one in found] == [("", [], ["Warn-0"]), ("", [warning], ["Warn-0"])]
    assert [one["IGNORE"] for one in found] == [("", [], ["IGNORE-0"])] * 2
    for text, _, saved in (one["fail"] for one in found):
        assert "rank 0 has tag 'fail-0', rank 1 has 'fail-1'" in text
        assert saved == []


def test_the_first_save_gathers_nothing_through_the_process_group(found: list[dict[str, Any]]) -> None:
    """The ranks agree through its store, so that a save is not mixed up with the collectives of the loop."""
    assert [one["gathered"] for one in found] == [[], []]


def test_the_ranks_go_on_as_if_nothing_had_been(found: list[dict[str, Any]]) -> None:
    assert [one["after"] for one in found] == [({}, []), ({}, [])]
