"""Draw roots of checkpoints, and say by the frameworks' own rules what can be loaded from them.

Source: DeepSpeed 0.19, runtime/engine.py (``load_checkpoint``, ``_get_all_zero_checkpoint_names``: ``latest`` names
the tag, and the files of all ranks must be there); transformers 5.23, trainer_utils.py (``get_last_checkpoint``: the
largest number); accelerate 1.15, accelerator.py (``load_state``: every model by its tag).
"""

from __future__ import annotations

import functools
import os
import random
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ckpttool
from ckpttool.saving.coordination import Alone
from ckpttool.saving.files import HostPayload, PlainFile
from ckpttool.saving.two_phase import Request, save
from ckpttool.storage import LATEST, LOCAL, MARK
from tests.truth import HERE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MODELS = {"a": "zero2-dp2-bf16-sgd/global_step3", "b": "zero3-dp2-bf16-trainer/checkpoint-3/global_step3"}
"""The tag of each model, in the fixtures."""
OLD = "ds0.3.16-zero2-dp2-fp16/global_step3"
"""Of a release that records nowhere that there should be an optimizer."""
LAYOUTS = ("tags", "old tags", "commits", "trainer", "accelerate", "state")
STATES = ("whole",) * 5 + ("torn", "cut off", "truncated", "uncommitted")
NESTED: dict[str, dict[str, bytes]] = {
    "weights": {"sft/checkpoint-60/model.safetensors": b"mine"},
    "DCP": {"sft/.metadata": b"mine", "sft/__0_0.distcp": b"mine"},
    "tag": {f"sft/step60/{name}": b"mine" for name in ("mp_rank_00_model_states.pt",)},
}
STRAYS = {
    "notes.txt": b"mine", "notes.20261126.partial": b"mine", "step1.replaced/notes": b"mine", "dcp/.metadata": b"mine",
    "global_step1.damaged/notes": b"mine", ".ckpttool-scratch-mine/notes": b"mine", "exports/model.safetensors": b"x",
}  # fmt: skip


@functools.cache
def files_of(fixture: str) -> Mapping[str, bytes]:
    """The files of a tag, by name."""
    return {path.name: path.read_bytes() for path in sorted((HERE / "checkpoints" / fixture).iterdir())}


@dataclass
class Item:
    """One checkpoint: what is kept or removed as a whole."""

    path: Path
    """Its directory: of the tag, or the folder of a framework."""
    step: int
    """Its place: larger ones are newer."""
    series: str
    """The model; of a folder, all of its models."""
    tags: dict[str, str]
    """The directories of the tags in it, relative to the path, with their fixtures."""
    is_pinned: bool = False

    def loads(self) -> bool:
        """Return whether its framework could resume from it: all files of all its tags are there and complete."""
        for tag, fixture in self.tags.items():
            for name, data in files_of(fixture).items():
                path = self.path / tag / name
                if not path.is_file() or not is_complete(path, data):
                    return False
        return not any((self.path / tag / MARK).exists() for tag in self.tags)


def is_complete(path: Path, pristine: bytes) -> bool:
    """Return whether torch could read a file: an archive with the size of the one that was written, and a directory."""
    data = path.read_bytes()
    return data == pristine or (len(data) == len(pristine) and zipfile.is_zipfile(path))


@dataclass
class Root:
    """A drawn root."""

    path: Path
    layout: str
    items: list[Item] = field(default_factory=list)
    foreign: dict[Path, bytes] = field(default_factory=dict)
    """Files that are not of a checkpoint of the root."""
    links: dict[Path, Path] = field(default_factory=dict)
    story: list[str] = field(default_factory=list)
    """What was drawn, for failures."""

    def named(self) -> Item | None:
        """What ``latest`` names."""
        latest = self.path / LATEST
        name = latest.read_text() if latest.is_file() else ""
        return next((item for item in self.items if item.path.name == name), None)

    def must_stay(self) -> dict[str, Item]:
        """What a framework loads next: what ``latest`` names, and the newest of each model; and what is pinned."""
        loadable = [item for item in self.items if item.loads()]
        named = self.named()
        found = {f"pinned {item.path.name}": item for item in self.items if item.is_pinned}
        found |= {
            f"target {link.name}": item for link, to in self.links.items() for item in loadable if item.path == to
        }
        if named in loadable:
            found["latest"] = named
        for series in {item.series for item in loadable}:
            own = [item for item in loadable if item.series == series]
            # What is newer than the one that ``latest`` names was abandoned.
            found[f"newest of {series}"] = named if named in own else max(own, key=lambda item: item.step)
        return found


def draw(seed: int, directory: Path) -> tuple[Root, random.Random]:
    """Draw a root, and return it with the generator for what is done to it."""
    rng = random.Random(seed)  # noqa: S311  the cases are the same in every run
    root = Root(directory / "root", rng.choice(LAYOUTS))
    root.path.mkdir(parents=True)
    root.story.append(f"seed {seed}, {root.layout}")
    steps = sorted(rng.sample(range(1, 12), rng.randint(2, 4)))
    if root.layout == "state":
        steps = steps[:1]
    two = rng.random() < 0.5
    for step in steps:
        _add(root, rng, step, two=two)
    if root.layout in {"tags", "old tags", "commits"}:
        names = [item.path.name for item in root.items]
        choice = rng.choice(["newest", "newest", "any", "missing", "none"])
        if root.layout == "commits":
            choice = rng.choice(["newest", "newest", "missing"])
        named = {"newest": names[-1], "any": rng.choice(names), "missing": "global_step77", "none": ""}[choice]
        (root.path / LATEST).unlink(missing_ok=True)
        if named:
            (root.path / LATEST).write_text(named)
        root.story.append(f"latest {named!r}")
    for item in root.items:
        _decorate(root, rng, item)
    for name in rng.sample(sorted(STRAYS), rng.randint(0, 3)):
        _foreign(root, root.path / name, STRAYS[name])
    if rng.random() < 0.3:
        _link(root, rng, directory)
    return root, rng


def _add(root: Root, rng: random.Random, step: int, *, two: bool) -> None:
    if root.layout == "trainer":
        folder = root.path / f"checkpoint-{step}"
        _write(folder, {f"global_step{step}": "b"})
        (folder / "trainer_state.json").write_text("{}")
        root.items.append(Item(folder, step, "b", {f"global_step{step}": MODELS["b"]}))
    elif root.layout in {"accelerate", "state"}:
        models = {"pytorch_model": "a", **({"pytorch_model_1": "b"} if two else {})}
        folder = root.path / f"checkpoint_{step}" if root.layout == "accelerate" else root.path
        _write(folder, models)
        (folder / "random_states_0.pkl").write_bytes(b"state")
        if root.layout == "accelerate":
            root.items.append(Item(folder, step, "both", {tag: MODELS[model] for tag, model in models.items()}))
        else:
            root.items += [
                Item(folder / tag, step, tag if two else model, {"": MODELS[model]}) for tag, model in models.items()
            ]
    else:
        for model in ("a", "b") if two and root.layout != "old tags" else ("a",):
            fixture = OLD if root.layout == "old tags" else MODELS[model]
            name = f"{ {'a': 'gen_step', 'b': 'disc_step'}[model] if two else 'global_step' }{step}"
            if root.layout == "commits":
                commit(root.path, name, step, fixture)
            else:
                _copy(root.path / name, fixture)
            root.items.append(Item(root.path / name, step, model, {"": fixture}))


def commit(root: Path, tag: str, step: int, fixture: str, *, overwrite: bool = False, skipped: object = None) -> None:
    """Save as ckpttool does."""
    request = Request(tag, step, 2, overwrite=overwrite, skipped=skipped)  # type: ignore[arg-type]
    files = [PlainFile(name, HostPayload(data)) for name, data in files_of(fixture).items()]
    save(LOCAL, str(root), Alone(), request, files)


def _write(folder: Path, models: dict[str, str]) -> None:
    for tag, model in models.items():
        _copy(folder / tag, MODELS[model])
    (folder / LATEST).write_text([*models][-1])


def _copy(directory: Path, fixture: str) -> None:
    directory.mkdir(parents=True)
    for name, data in files_of(fixture).items():
        (directory / name).write_bytes(data)


def _decorate(root: Root, rng: random.Random, item: Item) -> None:
    """Damage, pin and nest."""
    state = rng.choice(STATES)
    tag, fixture = rng.choice(sorted(item.tags.items()))
    files = [item.path / tag / name for name in files_of(fixture) if "optim" in name]
    if state == "torn":
        rng.choice(files).unlink()
    elif state == "cut off":
        for path in files:
            path.unlink()
    elif state == "truncated":
        path = rng.choice(files)
        os.truncate(path, path.stat().st_size // 2)
    elif state == "uncommitted":
        (item.path / tag / "ckpttool.json").unlink(missing_ok=True)
        (item.path / tag / MARK).write_text("{}")
    root.story.append(f"{item.path.relative_to(root.path)} is {state}")
    if state == "whole" and rng.random() < 0.2:
        ckpttool.pin(item.path / tag, why="mine")
        item.is_pinned = True
        root.story.append(f"{item.path.name} is pinned")
    if item.path != root.path and rng.random() < 0.15:
        kind = rng.choice(sorted(NESTED))
        for name, data in NESTED[kind].items():
            _foreign(root, item.path / name, data)
        root.story.append(f"{item.path.name} contains {kind}")


def _foreign(root: Root, path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    root.foreign[path] = data
    root.story.append(f"user's {path.relative_to(root.path)}")


def _link(root: Root, rng: random.Random, directory: Path) -> None:
    """A link to a checkpoint, or to one outside of the root."""
    link = root.path / rng.choice(["best", "exports-of-the-best"])
    target = rng.choice(root.items).path
    if rng.random() < 0.4:
        target = directory / "outside"
        _copy(target, MODELS["a"])
        root.foreign |= {path: path.read_bytes() for path in target.iterdir()}
    link.symlink_to(target)
    root.links[link] = target
    root.story.append(f"{link.name} is a link to {target.name}")
