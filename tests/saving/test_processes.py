"""Like test_killed, with real processes, SIGKILL and the stores of torch.distributed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.catalog.cleanup import maintain
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL
from tests.faults.disks import CHANGES
from tests.saving.checkpoints import chosen, debris, number_of, save_version
from tests.saving.conftest import in_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

pytest.importorskip("torch")
SAVES = [("step1", 1), ("step2", 2)]


def _run(directory: Path, points: list[dict[str, Any]]) -> list[list[dict[str, Any] | None]]:
    """What each rank of each point said at its end; None of one that was killed."""
    for number, point in enumerate(points):
        point["base"] = str(directory / f"{number}")
        os.mkdir(point["base"])
    plan = directory / "points.json"
    plan.write_text(json.dumps(points))
    here = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(here)}
    subprocess.run(
        [sys.executable, "-m", "tests.saving.killed_ranks", str(plan)], check=True, cwd=here, env=environment
    )
    plan.unlink()
    said: list[list[dict[str, Any] | None]] = []
    for point in points:
        files = [Path(point["base"]) / f"said-{rank}.json" for rank in range(point["size"])]
        said.append([json.loads(file.read_text()) if file.exists() else None for file in files])
    return said


def _point(fault: dict[str, Any] | None, store: str) -> dict[str, Any]:
    return {"size": 2, "saves": SAVES, "store": store, "fault": fault}


@dataclass(frozen=True)
class Ended:
    """A point, and what its ranks said."""

    point: dict[str, Any]
    said: list[dict[str, Any] | None]

    @property
    def fault(self) -> dict[str, Any]:
        fault = self.point["fault"]
        assert isinstance(fault, dict)
        return fault

    @property
    def root(self) -> str:
        return f"{self.point['base']}/root"


@pytest.fixture(scope="module")
def everything() -> Iterator[list[Ended]]:
    """All points, run at the same time: most of theirs is waiting for the dead."""
    with in_memory() as directory:
        (directory / "recorded").mkdir()
        recorded = _run(directory / "recorded", [_point(None, "file")])[0]
        points = []
        for rank, said in enumerate(recorded):
            assert said is not None
            changes = [i for i, name in enumerate(said["names"]) if name in CHANGES]
            # A spread of them; every single one is test_killed's.
            for i, number in enumerate(changes[:: max(1, len(changes) // 8)]):
                for store in ("file", "tcp"):
                    fault = {"rank": rank, "number": number, "how": "before", "everyone": (i + rank) % 3 == 0}
                    points.append(_point(fault, store))
            at = said["names"].index("ftruncate")  # of the rank's first payload
            points.append(_point({"rank": rank, "number": at, "how": "ENOSPC"}, "file"))
        yield [Ended(*both) for both in zip(points, _run(directory, points), strict=True)]


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_killed_processes(store: str, everything: list[Ended], crash_points: Callable[[int], None]) -> None:
    points = [e for e in everything if e.point["store"] == store and e.fault["how"] == "before"]
    assert len(points) >= 15
    survivors = 0
    for ended in points:
        rank, fault = ended.fault["rank"], ended.fault
        assert ended.said[rank] is None
        other = ended.said[1 - rank]
        assert (other is None) == fault["everyone"]
        failed = other is not None and "error" in other
        if other is not None and failed:
            # With TCP the store dies with the first rank.
            lost = rf"rank {rank} gave no sign of life|cannot be reached"
            late = lost if store == "tcp" else rf"rank {rank} was not heard of"
            assert re.search(late, other["error"]), (fault, other)
            survivors += 1
        found = chosen(ended.root)
        assert found is not None
        number_of(found[1], [2] if other is not None and not failed else [1, 2])
        save_version(LOCAL, ended.root, Alone(), "step3", 3)
        maintain(LOCAL, ended.root, None, grace=0)
        assert debris(ended.root) == []
        found = chosen(ended.root)
        assert found is not None
        assert number_of(found[1], [3]) == 3
    assert survivors >= 5
    crash_points(len(points))


def test_every_process_reports_the_failure(everything: list[Ended], crash_points: Callable[[int], None]) -> None:
    points = [e for e in everything if e.fault["how"] == "ENOSPC"]
    assert [e.fault["rank"] for e in points] == [0, 1]
    for ended in points:
        first, second = ended.said
        assert first is not None
        assert second is not None
        assert first["error"] == second["error"]
        assert f"rank {ended.fault['rank']}: " in first["error"]
        assert "_states.pt: no space left on the device" in first["error"]
        found = chosen(ended.root)
        assert found is not None
        assert number_of(found[1], [1]) == 1
    crash_points(len(points))
