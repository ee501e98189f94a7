"""Engines of one worker that are saved, removed and restored together, by name."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.storage import MANIFEST
from tests.deepspeed.engines import build, refusal, step
from tests.forked import on_ranks
from tests.rooms import present
from tests.wording import refused

pytestmark = pytest.mark.deepspeed


def _engines(stages: tuple[int, int], steps: int = 0) -> dict[str, Any]:
    """Two engines of one architecture, which take different steps: named so that one name is also a folder of verl."""
    engines = {
        "policy": build(stages[0], "bf16", "one", "adamw", 1),
        "critic": build(stages[1], "bf16", "one", "adamw", 2),
    }
    for sign, engine in enumerate(engines.values()):
        for _ in range(steps + sign if steps else 0):
            loss = engine(torch.ones(2, 6, dtype=torch.bfloat16)).float().mean() * (1 - 2 * sign)
            engine.backward(loss)
            engine.step()
    return engines


def _digests(engines: dict[str, Any]) -> list[str]:
    found = [ckpttool.live_digest(engine).to_json()["tensors"] for engine in engines.values()]
    return [str({state: own[state] for state in ("weights", "exp_avg", "exp_avg_sq")}) for own in found]


@on_ranks(2)
def _save(root: str, *, background: bool) -> list[str]:
    engines = _engines((2, 0), steps=2)
    rank = torch.distributed.get_rank()
    with ckpttool.CheckpointManager(root, async_save=background, keep_last=1) as manager:
        manager.save(engines, client_state={"epoch": 1})
        engines["policy"].global_steps += 1
        manager.save(engines, client_state={"epoch": 2}, rank_state=rank)
    if rank == 0:
        for name in engines:  # the documented way
            (Path(root).parent / "documented" / name).mkdir(parents=True)
    torch.distributed.barrier()
    for name, engine in engines.items():
        engine.save_checkpoint(str(Path(root).parent / "documented" / name))
    return _digests(engines)


def _restored(root: str) -> dict[str, Any]:
    engines = _engines((3, 1))
    manager = ckpttool.CheckpointManager(root)
    documented = str(Path(root).parent / "documented")
    found: dict[str, Any] = {
        "alone": refusal(lambda: manager.restore(engines["policy"])),
        "unknown": refusal(lambda: manager.restore({"policy": engines["policy"], "other": engines["critic"]})),
        "state": manager.restore(engines, prove=True, require_committed=True),
        "digests": _digests(engines),
    }
    assert manager.restored is not None
    found["rank states"] = list(manager.restored.rank_states)
    swapped = {"policy": engines["critic"], "critic": engines["policy"]}
    manager.restore(swapped)
    found["swapped"] = _digests(swapped)
    manager.restore({"critic": engines["critic"], "policy": engines["policy"]})
    found["rank states in another order"] = list(manager.restored.rank_states)
    found["left out"] = refusal(lambda: manager.restore({"critic": engines["critic"]}))
    found["twice"] = refusal(lambda: manager.restore(dict.fromkeys(engines, engines["critic"])))
    manager.restore({"critic": engines["critic"]}, weights_only=True)
    found["one by name"] = _digests({"critic": engines["critic"]})
    for name, engine in engines.items():
        ckpttool.load(engine, Path(documented) / name)
    found["documented"] = _digests(engines)
    manager.save({"policy": engines["policy"]}, tag="single")
    found["not together"] = refusal(lambda: ckpttool.CheckpointManager(root).restore(engines, tag="single"))
    return found


@on_ranks(1)
def _on_one(root: str) -> dict[str, Any]:
    return _restored(root)


@on_ranks(3)
def _on_three(root: str) -> dict[str, Any]:
    return _restored(root)


@pytest.mark.parametrize(("background", "resume"), [(False, _on_one), (True, _on_three)], ids=["to 1", "to 3"])
def test_engines_are_one_checkpoint(
    background: bool, resume: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    saved = _save(str(root), background=background)
    assert saved[0] == saved[1]
    assert saved[0][0] != saved[0][1]
    (directory,) = [path.parent for path in root.rglob(MANIFEST)]  # the one before was removed as a whole
    assert sorted(path.name for path in directory.iterdir()) == [MANIFEST, "critic", "policy"]
    whole = (directory / MANIFEST).read_bytes()
    (directory / MANIFEST).write_bytes(whole[:10])
    (entry,) = ckpttool.ls(root).entries
    assert not entry.whole
    assert f"{MANIFEST}: is not a manifest of ckpttool" in (entry.problem or "")
    (directory / MANIFEST).write_bytes(whole)
    (entry,) = ckpttool.ls(root).entries
    assert (entry.whole, entry.latest, entry.step, entry.problem) == (True, True, 3, None)
    assert all(d.keep for d in ckpttool.prune(root, keep_last=1))
    for name in ("policy", "critic"):
        _read_alone(directory / name, tmp_path / f"copy of {name}", monkeypatch)
    with refused(ckpttool.CkptError):
        ckpttool.inspect(root)
    for found in resume(str(root)):
        assert found["state"] == {"epoch": 2}
        assert found["rank states"] == found["rank states in another order"] == [0, 1]
        assert found["digests"] == found["swapped"] == saved[0]
        assert found["one by name"] == saved[0][1:]
        assert "several engines: critic, policy; pass the engines by name" in found["alone"]
        assert "of the engines critic, policy, and policy would not be restored; pass all" in found["left out"]
        assert "engine: has one engine under two of the names policy, critic" in found["twice"]
        assert "is a checkpoint of the engines critic, policy, and 'other' is not one of them" in found["unknown"]
        assert "'critic' is not one of them" in found["not together"]
        assert found["documented"][1] == saved[0][1]


def _read_alone(engine: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find the manifest above an engine's directory, however it is named; ``cp`` writes its part."""
    checked = {ckpttool.verify(engine, deep=True).records_checked}
    monkeypatch.chdir(engine)
    checked |= {ckpttool.verify(path, deep=True).records_checked for path in (".", f"../{engine.name}", "./")}
    assert ckpttool.inspect(".").attempt == ckpttool.inspect(engine).attempt
    monkeypatch.chdir(engine.parent)
    checked |= {ckpttool.verify(engine.name, deep=True).records_checked}
    assert ckpttool.inspect(engine).topology.world_size == 2
    copied = ckpttool.cp(engine, copy)
    assert "one of the engines policy, critic, which were saved together: the others are not copied" in copied.notes
    for path in (copy, copy / engine.name):
        report = ckpttool.verify(path, deep=True)
        assert report.findings == ()
        checked |= {report.records_checked}
    assert len(checked) == 1, "each time all chunks of the manifest"
    with min(copy.rglob("*states.pt")).open("r+b") as damaged:
        damaged.seek(-1, 2)
        damaged.write(b"x")
    assert ckpttool.verify(copy, deep=True).findings


def test_a_lost_file_of_one_engine_makes_the_checkpoint_torn(tmp_path: Path) -> None:
    root = tmp_path / "run"
    _save(str(root), background=False)
    (directory,) = [path.parent for path in root.rglob(MANIFEST)]
    shutil.rmtree(directory / "critic")
    (entry,) = ckpttool.ls(root).entries
    assert not entry.whole
    assert "critic/" in str(entry.problem)


@on_ranks(1)
def _go_on(root: str) -> dict[str, list[str]]:
    """Of each loss in the checkpoint of step 2: the step that is restored, then the directories after the next save."""
    engines = _engines((1, 2))
    manager = ckpttool.CheckpointManager(root)

    def train() -> None:
        for engine in engines.values():
            step(engine, 1)

    for _ in range(2):
        train()
        manager.save(engines)
    found = {}
    for how in ("a file", "a cut file", "an engine", "the manifest"):
        copy = Path(f"{root} without {how}")
        shutil.copytree(root, copy)
        newest = copy / "global_step2"
        file = next((newest / "critic").glob("*optim_states.pt"))
        if how == "a file":
            file.unlink()
        elif how == "an engine":
            shutil.rmtree(newest / "critic")
        else:
            (file if how == "a cut file" else newest / MANIFEST).write_bytes(file.read_bytes()[:10])
        listed = [f"{entry.name}{'' if entry.whole else '!'}" for entry in ckpttool.ls(copy).entries]
        again = ckpttool.CheckpointManager(copy)
        again.restore(engines)
        restored = engines["policy"].global_steps
        train()
        again.save(engines)
        found[how] = [*listed, str(restored), *sorted(path.name for path in copy.iterdir() if path.is_dir())]
    return found


def test_a_run_of_several_engines_passes_a_torn_checkpoint(tmp_path: Path) -> None:
    (found,) = _go_on(str(tmp_path / "run"))
    expected = ["global_step1", "global_step2!", "1", "global_step1", "global_step2", "global_step2.damaged"]
    assert found == dict.fromkeys(found, expected)


@on_ranks(1)
def _refused() -> list[str]:
    import deepspeed

    module = torch.nn.Linear(2, 2)
    manager = ckpttool.CheckpointManager("unused")
    inference = deepspeed.init_inference(module, dtype=torch.float32)
    wrong = [module, inference, None, (module, None), {"policy": module}]
    told = [refusal(partial(manager.save, one)) for one in wrong]
    told += [refusal(partial(manager.restore, one)) for one in wrong]
    told += [refusal(partial(ckpttool.load, one, "unused")) for one in wrong[1:-1]]
    named = build(1, "bf16", "one", "adamw")
    if present("thinning"):
        thins = ckpttool.CheckpointManager("unused", keep_last=1, thin="bf16")
        told_of_thin = refusal(partial(thins.save, {"policy": named}))
        assert "thin: is not possible for a checkpoint of several engines" in told_of_thin, told_of_thin
    told += [refusal(partial(manager.save, {name: named})) for name in ("", "a/b", "..", ".a", 1)]
    return [*told, refusal(partial(manager.save, {}))]


def test_what_is_not_an_engine_is_named() -> None:
    (told,) = _refused()
    kinds = ["torch.Linear", "deepspeed.InferenceEngine", "NoneType", "tuple", "torch.Linear"]
    expected = [f"engine: is of class {kind}, not a DeepSpeed engine of a training run; pass" for kind in kinds]
    save, restore = (f"{name}: is missing; pass {name}=..." for name in ("step", "optimizer"))
    starts = [save, *expected[1:-1], save, restore, *expected[1:-1], restore, *expected[1:-1]]
    for text, start in zip(told, starts, strict=False):
        assert text.startswith(start)
    assert all(text for text in told[13:])
    assert "is an empty mapping" in told[-1]


@on_ranks(1)
def _misfit(root: str) -> tuple[str, bool]:
    """Restore two engines of which the second has another module; return the error, and whether the first changed."""
    from deepspeed import initialize

    engines = _engines((1, 1), steps=2)
    manager = ckpttool.CheckpointManager(root)
    manager.save(engines)
    other = torch.nn.Linear(3, 5)
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    config["zero_allow_untested_optimizer"] = True
    critic = initialize(model=other, optimizer=torch.optim.AdamW(other.parameters()), config=config)[0]
    found = {"policy": _engines((1, 1), steps=1)["policy"], "critic": critic}
    before = _digests({"policy": found["policy"]})
    told = refusal(partial(manager.restore, found))
    return told, before != _digests({"policy": found["policy"]})


def test_no_engine_changes_if_one_does_not_fit(tmp_path: Path) -> None:
    ((told, changed),) = _misfit(str(tmp_path / "run"))
    assert told
    assert not changed


@on_ranks(2)
def _others(root: str) -> list[str]:
    engines = _engines((1, 0), steps=1)
    policy, critic = engines.values()
    manager = ckpttool.CheckpointManager(f"{root}/one")
    manager.save(policy)
    told = [refusal(partial(manager.save, one, tag="other")) for one in (critic, {"critic": critic}, engines)]
    manager.restore(critic, tag="global_step1", weights_only=True)  # as a reference
    manager.save(policy, tag="again")
    together = ckpttool.CheckpointManager(f"{root}/together", async_save=True)
    together.save(engines)
    told += [refusal(partial(together.save, one, tag="other")) for one in (policy, {"policy": policy})]
    together.save(engines, tag="again")
    del critic
    engines["critic"] = _engines((0, 0))["critic"]  # built anew
    together.save(engines, tag="replaced")
    together.wait()
    return told


def test_a_second_engine_is_not_saved_alone(tmp_path: Path) -> None:
    for told in _others(str(tmp_path)):
        other = "engine: is another than the engine that this run has saved or restored before; pass all engines"
        assert all(text.startswith(other) for text in told)
    assert sorted(entry.name for entry in ckpttool.ls(tmp_path / "one").entries) == ["again", "global_step1"]


@on_ranks(2)
def _damaged(root: str) -> dict[str, Any]:
    """Restore two engines after bytes of the second one were damaged: in the newest save, then in both."""
    engines = _engines((2, 1), steps=1)
    manager = ckpttool.CheckpointManager(root)
    found: dict[str, Any] = {"saved": []}
    for tag in ("first", "second"):
        manager.save(engines, tag=tag, client_state={"tag": tag})
        found["saved"].append(_digests(engines))
        for engine in engines.values():
            engine.backward(engine(torch.ones(2, 6, dtype=torch.bfloat16)).float().mean())
            engine.step()
    fresh = _engines((3, 0) if root.endswith("others") else (2, 1), steps=3)
    before = _digests(fresh)

    def damage(tag: str) -> None:
        if torch.distributed.get_rank() == 0:
            path = next(Path(root, tag, "critic").glob("*optim_states.pt"))
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        torch.distributed.barrier()

    damage("second")
    found["of the newest"] = refusal(partial(manager.restore, fresh, tag="second"))
    found["changed"] = _digests(fresh) != before
    found["state"] = manager.restore(fresh, prove=True)
    found["restored"] = _digests(fresh)
    damage("first")
    found["of all"] = refusal(partial(manager.restore, fresh))
    found["kept"] = _digests(fresh) == found["restored"]
    return found


@pytest.mark.parametrize("layout", ["alike", "others"])
def test_damaged_bytes_of_one_engine_change_none(layout: str, tmp_path: Path) -> None:
    for found in _damaged(str(tmp_path / layout)):
        assert "its bytes have changed since" in found["of the newest"]
        assert (found["changed"], found["kept"]) == (False, True)
        assert (found["state"], found["restored"]) == ({"tag": "first"}, found["saved"][0])
        assert "holds 2 checkpoints, and none can be restored" in found["of all"]
