"""Thin checkpoints hold the engine's weights; a crash at any operation leaves the whole checkpoint or the thin one."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import stat
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpttool
from ckpttool.analysis.digest import same_weights
from ckpttool.commit.manifest import read_manifest
from ckpttool.errors import CkptError, PruneError
from ckpttool.extensions.thinning.replacement import ThinOptions, plan_thinning, recover
from ckpttool.formats.dcp import ACCELERATE_MODEL, ACCELERATE_OPTIMIZER
from ckpttool.formats.zero.files import RUN_STATE
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, MANIFEST, THINNING, open_storage
from ckpttool.storage.local_writer import LocalWriter
from ckpttool.targets.dcp import LAYOUTS
from tests import sampling
from tests.catalog.torch_runs import assert_equal, assert_loads, loaded_by_torch, rounded, save, trained
from tests.faults.disks import CHANGES, READS, Fault, Machine, install
from tests.faults.power_failure import PowerFailure, build
from tests.saving import crew
from tests.saving.checkpoints import OF_SIGNATURE, save_version, sign, version
from tests.truth import NAMES, source, tag_directory, truth
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
MODULE = "ckpttool.extensions.thinning.replacement"
BF16 = ThinOptions(dtype="bf16", grace=0.0)
IN_ORDER = ThinOptions(dtype="bf16", grace=0.0, jobs=1)
"""In one thread, so that the operations have an order."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
UNNAMED = "pipeline-zero0-pp2-dp2-fp16"
"""Its optimizer holds fp32 master weights, and only numbers them."""
NATIVE = [name for name in NAMES if truth(name).stage is not None and name != UNNAMED]


def _thin(path: str | Path, options: ThinOptions = BF16) -> str:
    return plan_thinning(LOCAL, str(path), options).carry_out(LOCAL)


def _weights(directory: str | Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        found |= load_file(path)
    return found


def _assert_engines_weights(directory: str | Path, name: str, dtype: str) -> None:
    expected = truth(name).state_dict(DTYPES[dtype])
    got = _weights(directory)
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        assert got[key].dtype == tensor.dtype, key
        assert torch.equal(got[key], tensor), key


@pytest.mark.parametrize("name", sampling.swept(NATIVE))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_thin_checkpoint_holds_the_engines_weights(
    name: str, dtype: str, checkpoint_copy: Callable[[str], Path]
) -> None:
    path = checkpoint_copy(name)
    before = ckpttool.inspect(path)
    location = before.location
    weights = ckpttool.digest(path).weights
    digest = _thin(path, ThinOptions(dtype=dtype, grace=0.0))
    _assert_engines_weights(location, name, dtype)
    found = ckpttool.inspect(path)
    assert (found.format, found.thin, found.stage, found.step) == ("thin", True, None, before.step)
    assert (found.topology, found.samples, found.aliases) == (before.topology, before.samples, before.aliases)
    assert [b.name for b in found.buffers] == [b.name for b in before.buffers]
    assert {p.name for p in found.parameters if p.frozen} == {p.name for p in before.parameters if p.frozen}
    assert {f.name for f in found.files} <= {p.name for p in Path(location).iterdir()}
    assert ckpttool.verify(path, deep=True).findings == ()
    assert ckpttool.digest(path).weights == digest
    if dtype == "fp32":
        assert digest == weights
    manifest = read_manifest(LOCAL, location)
    assert set(manifest.files) | {MANIFEST} == {p.name for p in Path(location).iterdir()}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_masters_that_no_name_leads_to_do_not_go(dtype: str, tmp_path: Path) -> None:
    for name in ("global_step1", "global_step3"):
        shutil.copytree(tag_directory(UNNAMED), tmp_path / name)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for dry_run in (True, False):
        with refused(PruneError) as caught:
            ckpttool.prune(tmp_path, keep_last=1, thin=dtype, dry_run=dry_run)
        (old, _) = caught.value.decisions
        assert (old.keep, old.thin) == (True, None)
        assert old.reason.startswith("cannot be thinned: may hold fp32 master weights of 11 parameters, such as ")
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("name", ["zero2-dp2-bf16", "zero2-dp2-bf16-lightning", "zero3-dp2-bf16-trainer"])
def test_client_state_and_configuration_are_those_of_the_save(
    name: str, checkpoint_copy: Callable[[str], Path]
) -> None:
    path = checkpoint_copy(name)
    before = ckpttool.inspect(path)
    files = {f.name: torch.load(before.path(n), weights_only=False) for n, f in enumerate(before.files)}
    saved = next(v for n, v in sorted(files.items()) if n.endswith("model_states.pt"))
    _thin(path)
    loaded = torch.load(os.path.join(before.location, RUN_STATE), weights_only=True)
    assert loaded["ds_config"] == saved["ds_config"]
    assert set(loaded["client_state"]) == set(before.client_state)
    for key in before.client_state:
        assert repr(loaded["client_state"][key]) == repr(saved[key])
    assert (loaded["global_steps"], loaded["ds_version"]) == (saved["global_steps"], saved["ds_version"])
    after = ckpttool.inspect(path)
    assert after.ds_config == before.ds_config
    assert set(after.client_state) == set(before.client_state)


def test_model_configuration_comes_along(checkpoint_copy: Callable[[str], Path]) -> None:
    path = checkpoint_copy("zero2-dp2-bf16-trainer")
    location = ckpttool.inspect(path).location
    _thin(path)
    config = json.loads(Path(location, "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert Path(location, "tokenizer.json").read_bytes() == (Path(location).parent / "tokenizer.json").read_bytes()


def test_diff_of_a_thin_checkpoint_and_its_source_shows_the_weights_alone(
    checkpoint_copy: Callable[[str], Path],
) -> None:
    path = checkpoint_copy("zero2-dp2-fp32")
    _thin(path, ThinOptions(dtype="fp32", grace=0.0))
    report = ckpttool.diff(source("zero2-dp2-fp32"), path)
    assert report.different == ()
    assert len(report.tensors) == len(truth("zero2-dp2-fp32").state_dict(torch.float32))
    assert any("holds no optimizer states: only weights are compared" in note for note in report.notes)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_conversion_says_how_weights_alone_are_converted(
    stage: int, checkpoint_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    path = checkpoint_copy("zero2-dp2-bf16")
    _thin(path)
    with refused(CkptError):
        ckpttool.convert(path, tmp_path / "zero", to="zero", world_size=2, stage=stage)
    ckpttool.consolidate(path, tmp_path / "flat", to="safetensors")
    ckpttool.convert(tmp_path / "flat", tmp_path / "zero", to="zero", world_size=2, stage=stage)
    ckpttool.consolidate(tmp_path / "zero", tmp_path / "out", to="safetensors")
    expected = _weights(tmp_path / "flat")
    got = _weights(tmp_path / "out")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_thin_torch_run_is_what_torch_loads(layout: str, dtype: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    manager = ckpttool.CheckpointManager(tmp_path, layout=layout, keep_last=1, thin=dtype)
    manager.save(model, optimizer=optimizer, step=1, client_state={"epoch": 3})
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.step()
    manager.save(model, optimizer=optimizer, step=2)
    directory, names = tmp_path / "step-1", LAYOUTS[layout]
    found = ckpttool.inspect(directory)
    assert (found.thin, found.step, found.client_state["epoch"]) == (True, 1, 3)
    assert found.aliases.keys() | {n for n, _, _ in found.states()} >= {"tied", "0.weight"}
    assert ckpttool.verify(directory, deep=True).findings == ()
    expected = rounded(exact) if dtype == "bf16" else exact
    assert_equal(loaded_by_torch(directory / names.directories[0], names.model), expected)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    with refused(CkptError):
        ckpttool.load(model, directory, optimizer=optimizer)
    ckpttool.load(model, directory, weights_only=True)
    assert_equal(model.state_dict(), expected)
    ckpttool.consolidate(directory, tmp_path / "out", to="safetensors")
    manager.restore(model, optimizer=optimizer)
    assert getattr(manager.restored, "step", None) == 2


def test_thin_weights_of_fp64_keep_their_type_beside_fp32(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3).double()
    manager = ckpttool.CheckpointManager(tmp_path, keep_last=1, thin="fp32")
    for step in (1, 2):
        manager.save(model, optimizer=False, step=step)
    other = torch.nn.Linear(3, 3).double()
    ckpttool.load(other, tmp_path / "step-1", weights_only=True)
    assert ckpttool.inspect(tmp_path / "step-1").thin
    assert_equal(other.state_dict(), model.state_dict())


def _saved_by_torch(root: Path, step: int, *, accelerate: bool) -> dict[str, torch.Tensor]:
    """Save a run with ``dcp.save``, in one directory or in the two of Accelerate; return its weights."""
    model, optimizer = trained()
    for _ in range(step):
        optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    if accelerate:
        dcp.save({"model": weights}, checkpoint_id=root / f"checkpoint-{step}" / ACCELERATE_MODEL, no_dist=True)
        dcp.save({"optimizer": states}, checkpoint_id=root / f"checkpoint-{step}" / ACCELERATE_OPTIMIZER, no_dist=True)
    else:
        dcp.save({"model": weights, "optim": states}, checkpoint_id=root / f"step-{step}", no_dist=True)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("accelerate", [False, True])
def test_runs_that_torch_has_saved_are_kept_by_the_same_rules(accelerate: bool, tmp_path: Path) -> None:
    weights = [_saved_by_torch(tmp_path, step, accelerate=accelerate) for step in range(1, 6)]
    prefix, inner = ("checkpoint-", ACCELERATE_MODEL) if accelerate else ("step-", "")
    (tmp_path / f"{prefix}3" / inner / ".metadata").unlink()
    listed = {entry.name: entry.condition for entry in ckpttool.ls(tmp_path).entries}
    assert listed == {f"{prefix}{step}": "torn" if step == 3 else "whole" for step in range(1, 6)}
    decisions = ckpttool.prune(tmp_path, keep_last=1, keep_every=4, thin="bf16")
    assert {one.entry.name: one.thin for one in decisions if one.thin} == {f"{prefix}{n}": "bf16" for n in (1, 2)}
    for step in (1, 2):
        assert ckpttool.inspect(tmp_path / f"{prefix}{step}").thin
        own = weights[step - 1]
        exact = {
            name: own[name] for name in ("2.bias", "0.weight")
        }  # without states, as buffers; torch saves ties twice
        assert_equal(loaded_by_torch(tmp_path / f"{prefix}{step}" / inner), rounded(own) | exact)
    assert_equal(loaded_by_torch(tmp_path / f"{prefix}4" / inner), weights[3])
    assert ckpttool.inspect(tmp_path).tag == f"{prefix}5"  # not the only thin one
    ckpttool.prune(tmp_path, keep_last=1, torn=True, grace=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{prefix}{n}" for n in (1, 2, 5)]


def test_a_conversion_beside_a_run_is_kept_and_not_counted(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("zero2-dp2-bf16")
    for name in ("torch", "torch-3"):
        ckpttool.convert(root, root / name, to="dcp")
    decisions = {one.entry.name: one.keep for one in ckpttool.prune(root, keep_last=1)}
    assert decisions == {"global_step3": True, "torch": True, "torch-3": True}
    for name in ("a", "b"):
        shutil.copytree(root / "torch", root / "alone" / name)
    assert all(one.keep for one in ckpttool.prune(root / "alone", keep_last=1))


def test_a_thin_one_is_not_taken_for_the_root_of_saves_without_tags(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _saved_by_torch(tmp_path, step, accelerate=False)
        (tmp_path / f"step-{step}").rename(tmp_path / f"epoch_{step}")
    ckpttool.prune(tmp_path, keep_last=2, thin="bf16")
    assert ckpttool.inspect(tmp_path / "epoch_1").thin
    with refused(CkptError):
        ckpttool.inspect(tmp_path)


def test_exported_weights_below_a_save_of_torch_keep_it(tmp_path: Path) -> None:
    for step in (1, 2):
        _saved_by_torch(tmp_path, step, accelerate=False)
    ckpttool.consolidate(tmp_path / "step-1", tmp_path / "step-1" / "hf", to="safetensors")
    assert all(one.keep for one in ckpttool.prune(tmp_path, keep_last=1))


def test_a_conversion_of_torch_without_optimizer_is_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"model": trained()[0].state_dict()}, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    assert all(one.keep for one in ckpttool.prune(tmp_path, keep_last=1, grace=0))
    assert len([*tmp_path.iterdir()]) == 2


def test_files_of_the_user_stay(checkpoint_copy: Callable[[str], Path]) -> None:
    location = Path(ckpttool.inspect(checkpoint_copy("zero3-dp2-bf16")).location)
    (location / "notes.txt").write_text("mine")
    _thin(location)
    assert {p.name for p in location.iterdir()} == {"notes.txt", MANIFEST, RUN_STATE, "model.safetensors"}


def test_a_file_in_the_way_is_named_and_nothing_changes(checkpoint_copy: Callable[[str], Path]) -> None:
    location = Path(ckpttool.inspect(checkpoint_copy("zero3-dp2-bf16")).location)
    (location / "model.safetensors").write_text("mine")
    before = {p.name: p.read_bytes() for p in location.iterdir()}
    with refused(CkptError):
        _thin(location)
    assert {p.name: p.read_bytes() for p in location.iterdir()} == before


def test_thin_files_are_as_private_as_the_checkpoint(checkpoint_copy: Callable[[str], Path]) -> None:
    location = Path(ckpttool.inspect(checkpoint_copy("zero2-dp2-bf16")).location)
    for path in location.iterdir():
        path.chmod(0o640)
    _thin(location)
    assert {stat.S_IMODE(p.stat().st_mode) for p in location.iterdir()} == {0o640}


def test_damaged_source_stays_as_it_is(checkpoint_copy: Callable[[str], Path]) -> None:
    checkpoint = ckpttool.inspect(checkpoint_copy("zero3-dp2-bf16"))
    location, row = Path(checkpoint.location), checkpoint.parameters[0].states["fp32"].extents[0]
    path = Path(checkpoint.path(int(row["file"])))
    data = bytearray(path.read_bytes())
    data[int(row["offset"])] ^= 1
    path.write_bytes(data)
    before = {p.name: p.read_bytes() for p in location.iterdir()}
    with pytest.raises(CkptError):
        _thin(location)
    assert {p.name: p.read_bytes() for p in location.iterdir()} == before


def test_what_was_written_wrong_is_noticed_before_anything_goes(
    checkpoint_copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    location = Path(ckpttool.inspect(checkpoint_copy("zero2-dp2-bf16")).location)
    before = {p.name: p.read_bytes() for p in location.iterdir()}
    for victim in ("model.safetensors", RUN_STATE):
        real = LocalWriter.commit

        def commit(writer: LocalWriter, victim: str = victim, real: Any = real) -> None:
            real(writer)
            if Path(writer.path).name == victim:
                data = bytearray(Path(writer.path).read_bytes())
                data[-100] ^= 64
                Path(writer.path).write_bytes(data)

        with monkeypatch.context() as patch:
            patch.setattr(LocalWriter, "commit", commit)
            with pytest.raises(CkptError):
                _thin(location)
        assert {p.name: p.read_bytes() for p in location.iterdir()} == before


def test_a_checkpoint_that_is_replaced_meanwhile_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_version(LOCAL, str(tmp_path), Alone(), "step1", 0)
    save_version(LOCAL, str(tmp_path), Alone(), "step2", 2)

    def save_meanwhile(*given: Any) -> str:
        digest = same_weights(*given)
        save_version(LOCAL, str(tmp_path), Alone(), "step1", 3, overwrite=True)
        return digest

    monkeypatch.setattr(f"{MODULE}.same_weights", save_meanwhile)
    with refused(CkptError):
        _thin(tmp_path / "step1")
    found = {p.name: p.read_bytes() for p in (tmp_path / "step1").iterdir() if p.name != MANIFEST}
    assert found == version(3)


def test_two_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_version(LOCAL, str(tmp_path), Alone(), "step1", 0)
    errors = []

    def again(*given: Any) -> str:
        try:
            _thin(tmp_path / "step1")
        except CkptError as error:
            errors.append(str(error))
        return same_weights(*given)

    monkeypatch.setattr(f"{MODULE}.same_weights", again)
    _thin(tmp_path / "step1")
    assert len(errors) == 1
    assert "step1: is being thinned by process" in errors[0]
    assert ckpttool.inspect(tmp_path / "step1").thin


def test_a_signed_checkpoint_loses_its_signature(tmp_path: Path) -> None:
    """It was of the whole checkpoint."""
    save_version(LOCAL, str(tmp_path), Alone(), "step1", 0)
    sign(tmp_path / "step1")
    _thin(tmp_path / "step1")
    manifest = tmp_path / "step1" / MANIFEST
    assert not any(field in manifest.read_text() for field in OF_SIGNATURE)
    assert ckpttool.inspect(tmp_path / "step1").thin
    assert ckpttool.verify(tmp_path / "step1", deep=True).findings == ()


# ------------------------------------------------------------------------------------------------- crashes


def _prepared(root: Path, kind: str) -> Path:
    """A checkpoint saved by the manager's protocol, by plain DeepSpeed, or of a torch run."""
    if kind == "committed":
        save_version(LOCAL, str(root), Alone(), "step1", 0)
    elif kind == "plain":
        shutil.copytree(Path(source("zero2-dp2-bf16-sgd"), "global_step3"), root / "step1")
    else:
        save(str(root))
    return root / "step1"


def _state(directory: Path, whole: dict[str, bytes], *, recovered: bool = True) -> str:
    """ "whole" or "thin"; an assertion if it is neither, for readers and byte for byte."""
    found = ckpttool.inspect(directory)
    assert ckpttool.verify(directory, deep=True).findings == ()
    if ".metadata" in whole:
        assert_loads(directory, thin=found.thin, recovered=recovered)
        if found.thin:
            return "thin"
    elif found.thin:
        _assert_engines_weights(directory, "zero2-dp2-bf16-sgd", "bf16")
        return "thin"
    assert {name: (directory / name).read_bytes() for name in whole} == whole
    assert {f.name for f in found.files} <= whole.keys()
    return "whole"


def _faults(names: list[str]) -> Iterator[Fault]:
    for number, name in enumerate(names):
        if name in CHANGES:
            for how in ("before", "amid", "after") if name == "pwrite" else ("before", "after"):
                yield Fault(0, number, how)
        if name in CHANGES or name in READS:
            yield Fault(0, number, "EIO")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["committed", "plain", "torch"])
def test_a_crash_at_every_operation_loses_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_points: Callable[[int], None]
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    original = _prepared(base, kind)
    whole = {p.name: p.read_bytes() for p in original.iterdir()}
    machine, clock = Machine(), crew.Clock()

    def attempt(root: Path, *faults: Fault) -> Any:
        machine.reset(*(fault.rule() for fault in faults))
        with monkeypatch.context() as patch:
            install(machine, patch)
            (outcome,) = crew.Crew(1, machine, clock).do(lambda _: _thin(root / "step1", IN_ORDER))
        return outcome

    def fresh(number: int) -> Path:
        return Path(shutil.copytree(base, tmp_path / f"root{number}"))

    outcome = attempt(root := fresh(0))
    assert outcome.succeeded, outcome
    assert _state(root / "step1", whole) == "thin"
    final = {p.name for p in (root / "step1").iterdir()}
    names = machine.names[0]
    assert {"create", "pwrite", "fsync", "rename", "unlink"} <= set(names)
    seen: set[tuple[str, bool]] = set()
    tried, every = 0, [*_faults(names)]
    drawn = sampling.some(every, 10, key=f"thin: {kind}")
    first = [next(fault for fault in every if fault.how == how) for how in ("before", "EIO")]
    last = (fault for fault in reversed(every) if fault.how == "before")
    for number, fault in enumerate(itertools.chain(first, drawn, last), 1):
        # Killed after the commit; runs differ by a few writes.
        if number > len(first) + len(drawn) and ("thin", True) in seen:
            break
        outcome = attempt(root := fresh(number), fault)
        tried += 1
        assert outcome.killed or isinstance(outcome.error, CkptError) or outcome.succeeded, (fault, outcome)
        try:
            found = _state(root / "step1", whole, recovered=outcome.succeeded)
            seen.add((found, outcome.killed))
            if outcome.succeeded:
                assert found == "thin"
            recover(LOCAL, str(root / "step1"), grace=0)
            if found == "thin":  # goes on with the removal
                assert {p.name for p in (root / "step1").iterdir()} == final
            else:
                assert {p.name for p in (root / "step1").iterdir()} == whole.keys()
                _thin(root / "step1")
            assert _state(root / "step1", whole) == "thin"
            assert {p.name for p in (root / "step1").iterdir()} == final
        except (AssertionError, CkptError) as error:
            raise AssertionError(f"{fault} ({names[fault.number]}): {error}") from error
        shutil.rmtree(root)
    assert seen >= {("whole", True), ("thin", True), ("whole", False)}
    crash_points(tried)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["committed", "torch"])
def test_a_power_failure_loses_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_points: Callable[[int], None]
) -> None:
    original = _prepared(tmp_path / "base", kind)
    whole = {p.name: p.read_bytes() for p in original.iterdir()}
    root = Path(shutil.copytree(tmp_path / "base", tmp_path / "root"))
    disk = PowerFailure(str(root))
    machine, clock = Machine(), crew.Clock()
    with monkeypatch.context() as patch:
        install(machine, patch)
        (outcome,) = crew.Crew(1, machine, clock).do(lambda _: _thin(root / "step1", IN_ORDER))
    assert outcome.succeeded, outcome
    final = {p.name for p in (root / "step1").iterdir()}
    chance = random.Random("thin")  # noqa: S311
    seen: dict[Any, str] = {}
    tried = sampling.some(range(len(machine.journal) + 1), 10, key="thin")
    for number in range(len(machine.journal) + 1):
        if number:
            disk.apply(machine.journal[number - 1])
        for tree in disk.states(chance, some=2) if number in tried else ():
            key = frozenset((name, None if entry is None else hash(entry[0])) for name, entry in tree.items())
            if key in seen:
                continue
            broken = tmp_path / "broken"
            build(tree, str(broken))
            try:
                seen[key] = found = _state(broken / "step1", whole, recovered=False)
                recover(LOCAL, str(broken / "step1"), grace=0)
                assert _state(broken / "step1", whole) == found
                assert {p.name for p in (broken / "step1").iterdir()} == (final if found == "thin" else whole.keys())
            except (AssertionError, CkptError) as error:
                last = machine.journal[number - 1] if number else None
                raise AssertionError(f"after {last and (last.name, last.arguments[0])}: {error}") from error
            shutil.rmtree(broken)
    assert set(seen.values()) == {"whole", "thin"}
    crash_points(len(seen))


def test_another_machines_marker_is_respected_until_it_is_old(tmp_path: Path) -> None:
    directory = _prepared(tmp_path, "committed")
    mark = {"key": "x", "files": ["model.safetensors"], "old": [], "machine": "another", "process": 1, "host": "far"}
    (directory / THINNING).write_text(json.dumps(mark))
    (directory / "model.safetensors").write_text("half")
    with refused(CkptError):
        recover(LOCAL, str(directory), grace=3600)
    os.utime(directory / THINNING, (1, 1))
    assert recover(LOCAL, str(directory), grace=3600)
    assert not (directory / "model.safetensors").exists()
    assert not (directory / THINNING).exists()


def test_a_dry_run_leaves_what_a_killed_prune_has_left(tmp_path: Path) -> None:
    directory = _prepared(tmp_path, "committed")
    mark = {"key": "x", "files": ["model.safetensors"], "old": [], "machine": "another", "process": 1, "host": "far"}
    (directory / THINNING).write_text(json.dumps(mark))
    (directory / "model.safetensors").write_text("half")
    os.utime(directory / THINNING, (1, 1))
    ckpttool.prune(tmp_path, keep_last=1, thin="bf16", dry_run=True)
    assert (directory / "model.safetensors").read_text() == "half"
    assert (directory / THINNING).exists()
    ckpttool.prune(tmp_path, keep_last=1, thin="bf16")
    assert not (directory / "model.safetensors").exists()
    assert not (directory / THINNING).exists()


def test_a_damaged_marker_is_named(tmp_path: Path) -> None:
    directory = _prepared(tmp_path, "committed")
    (directory / THINNING).write_text("{")
    with refused(CkptError):
        recover(LOCAL, str(directory), grace=0)


def test_files_stay_in_a_storage_that_writes_them_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a storage deletes a file that is discarded, also after its commit."""
    url = f"memory://thin-{uuid.uuid4().hex}"
    storage = open_storage(url)
    save_version(storage, url, Alone(), "step1", 0)
    monkeypatch.setattr("ckpttool.storage.fsspec.PART_BYTES", 1024)
    found = plan_thinning(storage, f"{url}/step1", ThinOptions(dtype="fp32", grace=0.0, jobs=1))
    assert max(file.nbytes for file in found.plan.files) > 1024
    found.carry_out(storage)
    assert ckpttool.inspect(f"{url}/step1").thin
    assert ckpttool.verify(f"{url}/step1", deep=True).findings == ()


@pytest.mark.parametrize("as_link", [False, True])
@pytest.mark.parametrize("below", ["finetune/global_step1", "global_step1"])
def test_other_checkpoints_below_or_behind_a_link_keep_their_files(below: str, as_link: bool, tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(tag_directory("zero2-dp2-bf16"), tmp_path / f"root/global_step{step}")
    other = tmp_path / "elsewhere" if as_link else tmp_path / "root/global_step1" / below
    shutil.copytree(tag_directory("zero3-dp2-bf16-trainer"), other)
    if as_link:
        (tmp_path / "root/global_step1" / below).parent.mkdir(exist_ok=True)
        (tmp_path / "root/global_step1" / below).symlink_to(other)
        (tmp_path / "root/global_step1/newest").symlink_to(tmp_path / "root/global_step2")
    before = {path: path.read_bytes() for path in other.iterdir()}
    (decision, _) = ckpttool.prune(tmp_path / "root", keep_last=1, thin="bf16")
    assert decision.thin == "bf16"
    assert {path: path.read_bytes() for path in other.iterdir()} == before
    assert ckpttool.verify(tmp_path / "root/global_step2", deep=True).findings == ()
