"""Engines that restore checkpoints with symbolic links among their files."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import forked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpttool.integrations.deepspeed.report import LoadReport

RANKS = 2


def main(directory: Path) -> None:
    """Try everything on two ranks."""
    import deepspeed  # noqa: F401  before it is forked

    forked.run_ranks(RANKS, lambda: _rank(directory))


def _rank(directory: Path) -> None:
    from recipes import common

    from ckpttool import CheckpointManager
    from tests.deepspeed.optimizers import build, step

    common.start(seed=1)
    engine = build(2, "bf16", "two", "adamw")
    (directory / "disk").mkdir(exist_ok=True)
    root = _on_first(directory / "root", lambda path: path.symlink_to("disk"))  # the root itself is a link
    for tag in ("a", "b"):
        step(engine, 1)
        CheckpointManager(root).save(engine, tag=tag, client_state={"tag": tag})
    told = {"root is a link": _attempts(engine, root)}
    made: dict[str, Callable[[Path], None]] = {
        "file": lambda path: _moved(path, "b/mp_rank_00_model_states.pt", directory),
        "states": lambda path: _moved(path, "b/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", directory),
        "manifest": lambda path: _moved(path, "b/ckpttool.json", directory),
        "tag": lambda path: _moved(path, "b", directory),
        "latest": lambda path: _moved(path, "latest", directory),
        "older tag": lambda path: _moved(path, "a", directory),
        "inside": _moved_inside,
        "cache": lambda path: _cached(path, directory),
    }
    for name, change in made.items():
        copy = _on_first(directory / name, partial(_changed, root, change))
        src = copy / "models--a--b/snapshots/0123" if name == "cache" else copy
        told[name] = _attempts(engine, src)
    engine.destroy()
    import torch.distributed as dist

    if dist.get_rank() == 0:
        (directory / "told.json").write_text(json.dumps(told))
    common.leave()


def _on_first(path: Path, make: Callable[[Path], None]) -> Path:
    """What the first rank makes for all."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        make(path)
    dist.barrier()
    return path


def _changed(root: Path, change: Callable[[Path], None], path: Path) -> None:
    shutil.copytree(root, path)
    change(path)


def _moved(root: Path, name: str, directory: Path) -> None:
    """Something of a checkpoint lies elsewhere, behind a link."""
    elsewhere = directory / "elsewhere" / root.name
    elsewhere.mkdir(parents=True)
    (root / name).rename(elsewhere / "it")
    (root / name).symlink_to(elsewhere / "it")


def _moved_inside(root: Path) -> None:
    (root / "store").mkdir()
    for file in list((root / "b").iterdir()):
        file.rename(root / "store" / file.name)
        file.symlink_to(f"../store/{file.name}")


def _cached(root: Path, directory: Path) -> None:
    """As Hugging Face's cache keeps the files of a repository: links into the directory of its blobs."""
    blobs, snapshot = root / "models--a--b/blobs", root / "models--a--b/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted([*root.glob("b/*"), root / "latest"])):
        target = snapshot / file.relative_to(root)
        target.parent.mkdir(exist_ok=True)
        file.rename(blobs / str(number))
        target.symlink_to(blobs / str(number))
    shutil.rmtree(directory / "cache/b")


def _attempts(engine: Any, root: Path) -> dict[str, str]:
    """What each way to restore says; every rank must say the same."""
    import torch.distributed as dist

    import ckpttool
    from ckpttool import CheckpointManager

    follow = {"follow_links": True}
    told = {
        "restore": _told(lambda: CheckpointManager(root).restore(engine)),
        "restore b": _told(lambda: CheckpointManager(root).restore(engine, tag="b")),
        "preview": _told(lambda: _tag(CheckpointManager(root).preview(engine))),
        "load": _told(lambda: ckpttool.load(engine, root).client_state),
        "load_state_dict": _told(lambda: {"tag": "b"} if len(ckpttool.load_state_dict(root)) else None),
        "restore and follow": _told(lambda: CheckpointManager(root, storage_options=follow).restore(engine)),
        "load and follow": _told(lambda: ckpttool.load(engine, root, storage_options=follow).client_state),
    }
    dist.barrier()
    everywhere: list[Any] = [None] * RANKS
    dist.all_gather_object(everywhere, told)
    assert everywhere[0] == everywhere[1], everywhere
    return told


def _tag(report: LoadReport | None) -> dict[str, Any]:
    return {"tag": report and report.tag}


def _told(function: Callable[[], Mapping[str, Any] | None]) -> str:
    try:
        return str((function() or {}).get("tag"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
