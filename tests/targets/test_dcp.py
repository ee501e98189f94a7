"""DCP outputs: torch loads them bit for bit, sharded or not, and our reader reads them back."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckpttool import inspect
from ckpttool.analysis.digest import digest
from ckpttool.errors import PlanError
from ckpttool.targets.dcp import plan_dcp
from tests.execution.outputs import run_into
from tests.forked import each_on_ranks
from tests.truth import REPRESENTATIVE, as_tensor, source, truth
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

    from ckpttool.model import Checkpoint

ONE_PROCESS = pytest.mark.filterwarnings("ignore:.*torch.distributed:UserWarning")


def _write(checkpoint: Checkpoint, out: Path, **options: Any) -> Path:
    out.mkdir(parents=True)
    run_into(plan_dcp(checkpoint, **options), str(out), jobs=None)
    return out


def _expected(name: str) -> dict[str, torch.Tensor]:
    """Every tensor by the name that torch gives it: weights as the optimizer has them, tied names as well."""
    held = {key: as_tensor(array) for key, array in truth(name).states.items()}
    result = {}
    for key, tensor in held.items():
        kind, _, parameter = key.partition("/")
        if kind == "buffer" or kind == "fp32" or (kind == "module" and f"fp32/{parameter}" not in held):
            result[f"model.{parameter}"] = tensor
        elif kind != "module":
            result[f"optim.state.{parameter}.{kind}"] = tensor
    tied = truth(name).tied
    return result | {f"model.{alias}": result[f"model.{stored}"] for alias, stored in tied.items()}


# ------------------------------------------------------------------------------------------------- torch


@ONE_PROCESS
@pytest.mark.parametrize(
    "name", [*REPRESENTATIVE, "zero3-dp2-bf16-sub-groups", "zero1-dp2-bf16-empty", "zero0-dp2-bf16"]
)
def test_torch_loads_every_tensor_bit_for_bit(name: str, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    checkpoint = inspect(source(name))
    out = _write(checkpoint, tmp_path / "out")
    expected = _expected(name)
    wanted = {key: torch.full_like(tensor, 0) for key, tensor in expected.items()}
    described = dcp.FileSystemReader(str(out)).read_metadata().state_dict_metadata
    tensors = {key for key, value in described.items() if hasattr(value, "chunks")}
    steps = {key for key in tensors if key.endswith(".step")} - expected.keys()
    assert tensors - steps == expected.keys()
    wanted |= {key: torch.zeros(()) for key in steps}
    dcp.load(wanted, checkpoint_id=str(out), no_dist=True)
    for key, tensor in expected.items():
        assert wanted[key].dtype == tensor.dtype, key
        assert torch.equal(wanted[key], tensor), key
    for parameter in checkpoint.parameters:
        if parameter.group is not None and parameter.group >= 0:
            scalars = checkpoint.groups[parameter.group].scalars
            for key in scalars.keys() - parameter.states.keys():
                assert wanted[f"optim.state.{parameter.name}.{key}"].item() == scalars[key].value


@ONE_PROCESS
def test_torch_turns_it_into_one_file(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    name = "zero2-dp2-bf16"
    dcp_to_torch_save(str(_write(inspect(source(name)), tmp_path / "out")), str(tmp_path / "one.pt"))
    held = torch.load(tmp_path / "one.pt", weights_only=False)
    groups = truth(name).facts["groups"]
    assert [sorted(g["params"]) for g in held["optim"]["param_groups"]] == [sorted(g["params"]) for g in groups]
    for group, expected in zip(held["optim"]["param_groups"], groups, strict=True):
        assert group["lr"] == expected["lr"]
        assert list(group["betas"]) == expected["betas"]
    for key, tensor in _expected(name).items():
        value = held
        kind, *rest = key.split(".", 2) if key.startswith("optim.") else key.split(".", 1)
        value = value[kind]
        if kind == "optim":
            parameter, _, state = rest[1].rpartition(".")
            value = value["state"][parameter][state]
        else:
            value = value[rest[0]]
        assert torch.equal(value, tensor), key


@ONE_PROCESS
def test_a_description_equals_the_file_of_torch_save(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import Metadata

    out = _write(inspect(source("zero1-dp1-bf16")), tmp_path / "ours", max_file_bytes=20_000)
    with (out / ".metadata").open("rb") as file:
        ours = pickle.load(file)
    assert isinstance(ours, Metadata)
    tensors = {key: torch.zeros(value.size, dtype=value.properties.dtype)
               for key, value in ours.state_dict_metadata.items() if hasattr(value, "chunks")}  # fmt: skip
    dcp.save(tensors, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    theirs = dcp.FileSystemReader(str(tmp_path / "theirs")).read_metadata()
    assert {k: v for k, v in ours.state_dict_metadata.items() if k in tensors} == theirs.state_dict_metadata
    assert {i for i in ours.storage_data if i.fqn in tensors} == set(theirs.storage_data)
    assert {i.index for i in ours.storage_data if i.fqn in tensors} == {i.index for i in theirs.storage_data}
    assert ours.version == theirs.version
    assert {len(v.__dict__) for v in ours.storage_data.values()} == {3}
    files = {p.name: p.stat().st_size for p in out.iterdir()}
    assert len(files) > 3
    assert all(i.offset % 64 == 0 and i.offset + i.length <= files[i.relative_path] for i in ours.storage_data.values())


# ------------------------------------------------------------------------------------------------- FSDP


def resume(job: dict[str, Any]) -> None:
    """Shard the model as people do, load, and compare what the model and its optimizer then hold."""
    import warnings

    import torch.distributed.checkpoint as dcp
    from recipes.plain import build_model, param_groups
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    warnings.simplefilter("ignore")
    layout, checkpoint = job["id"], job["checkpoint"]
    torch.manual_seed(7)
    model = build_model()
    mesh = init_device_mesh("cpu", (job["world_size"],))
    for module in (model.frozen_proj, model.up, model.down, model.norm):  # not the root, which has a scalar
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(param_groups(model))

    class AppState(Stateful):  # type: ignore[misc]  # torch is not followed
        """As in torch's tutorial, and in Ray's FSDP2 template."""

        def state_dict(self) -> dict[str, Any]:
            weights, states = get_state_dict(model, optimizer)
            return {"model": weights, "optim": states, **({"epoch": 0} if layout == "app" else {})}

        def load_state_dict(self, found: dict[str, Any]) -> None:
            assert found.get("epoch", 2) == 2  # Ray's FSDP2 template has it, too: of the client state
            set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])

    if layout == "app":
        dcp.load({"app": AppState()}, checkpoint_id=checkpoint)
    else:
        state = AppState().state_dict()
        dcp.load(state, checkpoint_id=checkpoint)
        AppState().load_state_dict(state)
    expected = truth("zero3-dp2-bf16")

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    sharded = 0
    for name, parameter in model.named_parameters():
        sharded += isinstance(parameter.data, DTensor)
        kind = "fp32" if parameter.requires_grad else "module"
        assert torch.equal(whole(parameter.data), expected.tensors[f"{kind}/{name}"].float()), name
        if parameter.requires_grad:
            state = optimizer.state[parameter]
            assert state["step"].item() == expected.scalars[0]["step"]
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(whole(state[key]), expected.tensors[f"{key}/{name}"]), (key, name)
    assert sharded == 7
    for name, buffer in model.named_buffers():
        if name != "scratch":
            assert torch.equal(buffer, expected.tensors[f"buffer/{name}"].to(buffer.dtype)), name
    for group, kept in zip(optimizer.param_groups, expected.facts["groups"], strict=True):
        assert (group["lr"], group["weight_decay"], group["eps"]) == (kept["lr"], kept["weight_decay"], kept["eps"])
    model(torch.arange(12).reshape(2, 6)).float().sum().backward()
    optimizer.step()


@pytest.mark.deepspeed
def test_fsdp_resumes_from_it(tmp_path: Path) -> None:
    checkpoint, jobs = inspect(source("zero3-dp2-bf16")), []
    for layout in ("nested", "app"):
        out = _write(checkpoint, tmp_path / layout, layout=layout, max_file_bytes=30_000)
        jobs.append({"id": layout, "world_size": 2, "checkpoint": str(out)})
    done = each_on_ranks(resume, jobs, imports=["torch.distributed.checkpoint", "torch.distributed.fsdp"])
    assert {layout: len(ranks) for layout, ranks in done.items()} == {"nested": 2, "app": 2}


@ONE_PROCESS
def test_numbers_of_parameters_are_the_ones_of_deepspeed_and_not_rounded(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    name = "ds0.19.6-zero0-dp2-fp16-onebit-lamb"
    out = _write(inspect(source(name)), tmp_path / "out")
    dcp_to_torch_save(out, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)["optim"]["state"].values()
    saved = torch.load(f"{source(name)}/global_step3/mp_rank_00_model_states.pt", weights_only=False)["optimizer"]
    held = saved["optimizer_state_dict"]["state"].values()
    for key in ("lamb_coeff_freeze", "last_factor", "scaling_coeff"):
        numbers = sorted(state[key] for state in held if key in state)
        written = sorted(state[key] for state in found if key in state)
        assert written == numbers
        assert {type(number) for number in written} == {float}  # a tensor of fp32 equals the number that it rounds
    assert all(torch.equal(state["step"], torch.tensor(4.0)) for state in found)


# ------------------------------------------------------------------------------------------------- our own reader


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_reading_back_gives_the_same(name: str, tmp_path: Path) -> None:
    before = inspect(source(name))
    after = inspect(str(_write(before, tmp_path / "out", max_file_bytes=100_000)))
    assert after.format == "dcp"
    # Nothing in such a directory says which names are tied.
    alone = replace(after, parameters=tuple(p for p in after.parameters if p.name not in before.aliases))
    assert digest(alone, jobs=1, advance=lambda _: None) == digest(before, jobs=1, advance=lambda _: None)


# ------------------------------------------------------------------------------------------------- the plan


def test_files_are_bounded_and_the_description_comes_last() -> None:
    checkpoint = inspect(source("zero2-dp2-bf16"))
    largest = max(4 * p.numel for p in checkpoint.parameters) + 4000
    one = plan_dcp(checkpoint)
    assert [f.name for f in one.files] == ["__0_0.distcp", ".metadata"]
    many = plan_dcp(checkpoint, max_file_bytes=largest)
    assert many.files[-1].name == ".metadata"
    assert [f.name for f in many.files[:-1]] == [f"__0_{i}.distcp" for i in range(len(many.files) - 1)]
    assert len(many.files) > 2
    assert all(f.nbytes <= largest for f in many.files[:-1])
    values = sum(p.numel * 4 * 3 for p in checkpoint.parameters if not p.frozen)
    assert one.nbytes_written - values < 2000 * 100  # about 1.5 kB for each tensor and number


def test_groups_of_deepspeeds_adam_get_what_torchs_asks_for(tmp_path: Path) -> None:
    name = "zero0-dp2-bf16"  # FusedAdam
    out = _write(inspect(source(name)), tmp_path / "out")
    with (out / ".metadata").open("rb") as file:
        described = pickle.load(file).state_dict_metadata
    wanted = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    assert {f"optim.param_groups.1.{key}" for key in wanted} <= described.keys()


def test_lightning_gets_no_checkpoint_without_its_state() -> None:
    with refused(PlanError):
        plan_dcp(inspect(source("zero3-dp2-bf16")), layout="lightning")


def test_two_things_of_one_name_are_refused() -> None:
    checkpoint = inspect(source("zero1-dp1-bf16"))
    twice = replace(checkpoint, parameters=(*checkpoint.parameters, checkpoint.parameters[0]))
    with refused(PlanError):
        plan_dcp(twice)
