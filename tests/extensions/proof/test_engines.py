"""Saves record digests of the live state; restores on other ranks and stages are proven, without a false alarm."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from tests import sampling
from tests.deepspeed import engines
from tests.forked import each_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.deepspeed

COPIES = "the module's copies of 6 weights, whose digests were not recorded"
"""Note on a background save of ZeRO-3, which does not record them, and on one of fp32 without ZeRO, which has none."""
OTHER_TYPE = "the module's copies of 6 weights, whose type is another"
STAGES, DTYPES = (0, 1, 2, 3), ("fp32", "bf16")
SAVES: list[dict[str, Any]] = sampling.pairs(
    {
        "id": f"z{stage}-{dtype}-{optimizer}-{ranks}{'-background' * background}",
        "world_size": ranks, "stage": stage, "dtype": dtype, "optimizer": optimizer, "background": background,
    }
    for stage, dtype, optimizer, ranks, background in itertools.product(
        STAGES, DTYPES, ("adamw", "momentum", "fused"), (1, 3), (False, True)
    )
    if not background or (optimizer, ranks) == ("adamw", 3)
)  # fmt: skip
RESTORES: list[dict[str, Any]] = sampling.pairs(
    {
        "id": f"to-z{stage}-{dtype}-{groups}-{ranks}",
        "world_size": ranks,
        "stage": stage,
        "dtype": dtype,
        "groups": groups,
    }
    for stage, dtype, groups, ranks in itertools.product(STAGES, DTYPES, ("two", "swapped"), (1, 2, 3))
    if groups == "two" or ranks == 2
)


def _save(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    engine = engines.build(job["stage"], job["dtype"], "two", job["optimizer"])
    engines.step(engine, 3)
    root = directory / job["id"]
    client_state = {"epoch": 3, "order": list(range(300)), "nested": {"seen": (1, 2.5, None)}}
    with ckpttool.CheckpointManager(root, async_save=job["background"]) as manager:
        manager.save(engine, client_state=client_state, rank_state={"rng": ckpttool.rng_state()})
    live = ckpttool.live_digest(engine)
    found: dict[str, Any] = {"proof": str(ckpttool.prove(engine, root)), "live": live.to_json()["tensors"]}
    engine.save_checkpoint(str(root / "plain"))
    found["plain"] = str(ckpttool.prove(engine, root / "plain"))
    return found


def _restore(job: dict[str, Any], directory: Path) -> list[str]:
    told = []
    for source in job["sources"]:
        engine = engines.build(job["stage"], job["dtype"], job["groups"], source["optimizer"], seed=7)
        engines.step(engine, 2)
        manager = ckpttool.CheckpointManager(directory / source["id"])
        manager.restore(engine, prove=True)
        told.append(str(manager.restored and manager.restored.proof))
        told.append(str(manager.restored))
        engine.destroy()
    return told


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("proof")


@pytest.fixture(scope="module")
def saved(directory: Path) -> dict[str, list[Any]]:
    return each_on_ranks(_save, SAVES, directory)


@pytest.mark.parametrize("save", SAVES, ids=lambda save: save["id"])
def test_the_files_of_a_save_have_the_digests_of_the_live_state(
    save: dict[str, Any], saved: dict[str, list[Any]], directory: Path
) -> None:
    everyone, path = saved[save["id"]], directory / save["id"]
    for one in everyone:
        assert "equal the state saved at step 3 (" in one["proof"]
        assert "equal the files of step 3 (" in one["plain"]
        notes = ["client_state, rank_state, which the live run does not have, or was not passed"]
        notes += [COPIES] if save["background"] and save["stage"] == 3 else []
        assert one["proof"].partition("; not compared: ")[2] == "; ".join(notes)
        assert one["live"] == everyone[0]["live"]
    files = ckpttool.digest(path).tensors
    assert len(files["weights"]) == 6
    assert {"weights", "module"} | everyone[0]["live"].keys() == {"module"} | files.keys()
    for key in files.keys() & everyone[0]["live"].keys():
        assert {name: str(one) for name, one in files[key].items()} == everyone[0]["live"][key], key


def test_any_of_them_is_proven_on_other_ranks_and_at_another_stage(
    saved: dict[str, list[Any]], directory: Path
) -> None:
    assert saved
    jobs: list[dict[str, Any]] = [{**job, "sources": sampling.some(SAVES, 2, key=job["id"])} for job in RESTORES]
    found = each_on_ranks(_restore, jobs, directory)
    for job in jobs:
        for told in found[job["id"]]:
            for proof, report, source in zip(told[::2], told[1::2], job["sources"], strict=True):
                assert proof.startswith("proven: "), (job["id"], source["id"])
                bare = (
                    source["background"] if source["stage"] == 3 else (source["stage"], source["dtype"]) == (0, "fp32")
                )
                same = source["world_size"] == job["world_size"]
                notes = [] if same else ["rank_state, which the live run does not have, or was not passed"]
                other = source["dtype"] != job["dtype"] and (job["stage"], job["dtype"]) != (0, "fp32")
                notes += [OTHER_TYPE] if other else []
                left_out = proof.partition("; not compared: ")[2]
                assert left_out in {"; ".join(notes), *(["; ".join([*notes, COPIES])] if bare and not other else [])}
                assert report.endswith(proof), "the log of a restore has the proof"
                for state in ("weights", "hyper-parameters", "client_state", "global_steps"):
                    assert state in proof
                assert ("rank_state;" in proof) == same


def test_digests_do_not_depend_on_ranks_and_stage(tmp_path: Path) -> None:
    jobs = sampling.pairs(
        {"id": f"{stage}-{ranks}-{dtype}", "world_size": ranks, "stage": stage, "dtype": dtype}
        for stage, ranks, dtype in itertools.product(STAGES, (1, 2, 3, 4), DTYPES)
    )
    found = each_on_ranks(_begin, jobs, tmp_path)
    begins = {job["id"]: {str(sorted(one["weights"].items())) for one in found[job["id"]]} for job in jobs}
    # Under bf16 DeepSpeed makes its masters before or after it rounds the weights, at one stage or another.
    kinds = [[job["id"] for job in jobs if job["dtype"] == "fp32"]]
    kinds += [[job["id"] for job in jobs if (job["dtype"], job["stage"]) == ("bf16", stage)] for stage in STAGES]
    for kind in kinds:
        assert len(set.union(*(begins[name] for name in kind))) == 1


def _begin(job: dict[str, Any], _: Path) -> dict[str, Any]:
    digests: dict[str, Any] = ckpttool.live_digest(engines.build(job["stage"], job["dtype"], "two", "adamw")).to_json()
    return {"weights": {n: text.split()[-1] for n, text in digests["tensors"]["weights"].items()}}


def _without_a_group(job: dict[str, Any], directory: Path) -> str:
    """Save a model of which a layer is in no group of the optimizer, and restore it at another stage."""
    import deepspeed
    import torch

    def build(stage: int, seed: int) -> Any:
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        config = {
            "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }  # fmt: skip
        return deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net[0].parameters()), config=config)[0]

    manager = ckpttool.CheckpointManager(directory / job["id"])
    manager.save(build(2, 0), tag="a")
    return engines.refusal(lambda: manager.restore(build(job["stage"], 1), tag="a", prove=True))


def test_a_parameter_in_no_group_is_restored_or_refused(tmp_path: Path) -> None:
    jobs = [{"id": str(stage), "world_size": 2, "stage": stage} for stage in (1, 2, 3)]
    found = each_on_ranks(_without_a_group, jobs, tmp_path)
    assert found["1"] == found["2"] == ["", ""]
    for told in found["3"]:
        assert "is in no group of the optimizer: ZeRO-3 cannot load it; add it" in told


def _untied(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Save a model with a tied parameter, and restore it into one that has untied it and does not train it."""
    import deepspeed
    import torch

    def build(seed: int, *, saved: bool) -> Any:
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        if saved:
            net[2].weight = net[0].weight
            net[0].requires_grad_(job["was trained"])
        else:
            net[0].requires_grad_(job["was trained"])
            net[2].weight.requires_grad_(job["requires gradient"])
        trained = [p for n, p in net.named_parameters() if p.requires_grad and (saved or n != "2.weight")]
        config = {
            "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": job["stage"]},
            "zero_allow_untested_optimizer": True, "bf16": {"enabled": job["bf16"]},
        }  # fmt: skip
        return deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(trained), config=config)[0]

    def values(engine: Any, number: int) -> list[float]:
        weight = engine.module[number].weight
        with deepspeed.zero.GatheredParameters([weight], enabled=job["stage"] == 3):
            return [float(one) for one in weight.detach().flatten()]

    engine = build(0, saved=True)
    engine.backward(engine(torch.ones(2, 6, dtype=torch.bfloat16 if job["bf16"] else None)).float().pow(2).mean())
    engine.step()
    manager = ckpttool.CheckpointManager(directory / job["id"])
    manager.save(engine, tag="a")
    found: dict[str, Any] = {"saved": values(engine, 0)}
    paths = {
        "load": lambda live: ckpttool.load(live, directory / job["id"], tag="a", prove=True),
        "weights alone": lambda live: ckpttool.load(live, directory / job["id"], tag="a", weights_only=True),
        "restore": lambda live: manager.restore(live, tag="a", prove=True),
    }
    for name, load in paths.items():
        live = build(1, saved=False)
        began = values(live, 2)
        told = engines.refusal(lambda load=load, live=live: load(live))  # type: ignore[misc]
        found[name] = {"began": began, "told": told, "now": values(live, 2)}
    return found


def test_a_parameter_that_was_tied_at_the_save_is_restored_or_refused(tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = [
        {"stage": stage, "was trained": trained, "requires gradient": gradient, "bf16": bf16}
        for stage in (1, 3)
        for trained, gradient, bf16 in (*itertools.product((True, False), (True, False), (False,)), (True, False, True))
    ]
    jobs = [{"id": str(number), "world_size": 2, **job} for number, job in enumerate(jobs)]
    for job, ranks in zip(jobs, each_on_ranks(_untied, jobs, tmp_path).values(), strict=True):
        for rank in ranks:
            for path in ("load", "weights alone", "restore"):
                one = rank[path]
                assert one["began"] != rank["saved"]
                if job["stage"] == 3 and job["requires gradient"] and path != "weights alone":
                    told = "holds 2.weight, which needs a gradient but is in no group of the optimizer: ZeRO-3 cannot"
                    assert told in one["told"], (job, path)
                    assert one["now"] == one["began"]
                else:
                    assert one["told"] == "", (job, path)
                    assert one["now"] == rank["saved"], (job, path)


def _changed_outside(job: dict[str, Any], directory: Path) -> dict[str, str]:
    """Prove an engine after changes that its files do not have, and a save between two steps."""
    import torch

    def told(call: Callable[[], Any]) -> str:
        try:
            return str(call()).splitlines()[-1]
        except ckpttool.CkptError as error:
            return f"{type(error).__name__}: {error}"

    rank, path = torch.distributed.get_rank(), directory / job["id"]
    engine = engines.build(job["stage"], job["dtype"], "two", job["optimizer"], accumulation=2)
    engines.step(engine, 1)
    manager = ckpttool.CheckpointManager(path)
    manager.save(engine, tag="pending")
    engines.step(engine, 1)
    manager.save(engine, tag="a")
    found = {"pending": told(lambda: ckpttool.load(engine, path, tag="pending", prove=True))}
    found["weights"] = told(lambda: ckpttool.load(engine, path, tag="a", weights_only=True, prove=True))
    found["same"] = told(lambda: ckpttool.load(engine, path, tag="a", prove=True))
    if job["stage"]:
        engine.optimizer.loss_scaler.cur_scale *= 4**rank
        found["scale"] = told(lambda: ckpttool.prove(engine, path, tag="a"))
        engine.optimizer.loss_scaler.cur_scale /= 4**rank
    if job["stage"] < 3:
        for parameter in engine.module.parameters():
            parameter.data = parameter.data.clone()
        found["moved"] = told(lambda: ckpttool.prove(engine, path, tag="a"))
        engine.module.load_state_dict({k: v.clone() for k, v in engine.module.state_dict().items()}, assign=True)
        found["assigned"] = told(lambda: ckpttool.prove(engine, path, tag="a"))
    return found


def test_changes_beside_the_files_are_named(tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = [
        {"id": f"z{stage}-{dtype}-{own}", "world_size": 2, "stage": stage, "dtype": dtype, "optimizer": own}
        for stage, dtype, own in (
            (0, "bf16", "adamw"),
            (0, "bf16", "fused"),
            (1, "bf16", "adamw"),
            (2, "fp32", "adamw"),
            (3, "bf16", "adamw"),
        )
    ]
    for name, ranks in each_on_ranks(_changed_outside, jobs, tmp_path).items():
        for told in ranks:
            lost = "the gradients of 1 micro batches since the last step before the save"
            assert lost in told["pending"].partition("; not compared: ")[2], (name, told)
            assert told["weights"].endswith("; not compared: all but the weights and buffers, which were left out"), (
                told
            )
            assert told["same"].startswith("proven: "), (name, told)
            assert "not compared" not in told["same"], (name, told)
            scale = "is not the live state: loss_scale is 4 on rank 1, and was not saved"
            assert "scale" not in told or scale in told["scale"], (name, told)
            if "moved" in told:
                assert told["moved"].startswith("proven: "), (name, told)
                assert "has an optimizer with a parameter of shape" in told["assigned"], (name, told)
                assert "that its module does not have; build a new engine" in told["assigned"], (name, told)


def _numbered(job: dict[str, Any], directory: Path) -> list[str]:
    """Prove a plain save whose optimizer numbers parameters of one shape, in groups of another order than the model."""
    path = directory / job["id"]
    engine = engines.build(0, job["dtype"], "layers swapped", job["optimizer"])
    engines.step(engine, 2)
    engine.save_checkpoint(str(path))
    told = [str(ckpttool.prove(engine, path))]
    states = getattr(engine.optimizer, "optimizer", engine.optimizer).state.values()
    one, other = sorted(states, key=lambda own: -own["exp_avg"].numel())[:2]
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]
    return [*told, engines.refusal(lambda: ckpttool.prove(engine, path))]


def test_numbered_parameters_have_the_order_of_the_engine(tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = [
        {"id": f"{dtype}-{own}", "world_size": 2, "dtype": dtype, "optimizer": own}
        for dtype, own in (("fp32", "adamw"), ("bf16", "adamw"), ("bf16", "fused"))
    ]
    for proof, error in itertools.chain(*each_on_ranks(_numbered, jobs, tmp_path).values()):
        assert "(weights, exp_avg_sq, exp_avg" in proof, proof
        assert proof.endswith("; not compared: the order of the optimizer's parameters, which the files number"), proof
        assert "is not the live state: exp_avg of a." in error, error


def _experts(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Save experts that are spread over ranks, restore them, and change one on the last rank."""
    import deepspeed
    import torch
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    class Net(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(6, 6)
            self.experts = MoE(6, torch.nn.Linear(6, 6), num_experts=4, ep_size=job["experts"], k=1, min_capacity=0)

        def forward(self, x: Any) -> Any:
            return self.experts(self.first(x))[0]

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        net = Net()
        groups = split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters()), "name": "all"})
        config = {
            "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": job["stage"]}, "zero_allow_untested_optimizer": True,
        }  # fmt: skip
        return deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups, lr=0.01), config=config)[0]

    engine = build(0)
    torch.manual_seed(torch.distributed.get_rank())
    for step in range(3):
        engine.backward(engine(torch.randn(4, 6).bfloat16() + step).float().square().sum())
        engine.step()
    with ckpttool.CheckpointManager(directory / job["id"], async_save=job["background"]) as manager:
        manager.save(engine)
    recorded = json.loads((directory / job["id"] / "global_step3" / "ckpttool.json").read_text())["digests"]["tensors"]
    engine = build(5)
    manager.restore(engine, prove=True)
    found = {"proof": str(manager.restored and manager.restored.proof), "recorded": recorded}
    *_, expert = (p for n, p in engine.module.named_parameters() if "deepspeed_experts" in n)
    if torch.distributed.get_rank() == job["world_size"] - 1:
        expert.data.view(-1)[0] += 1
    found["error"] = engines.refusal(lambda: ckpttool.prove(engine, directory / job["id"]))
    return found


def test_experts_of_every_rank_are_recorded_and_proven(tmp_path: Path) -> None:
    jobs = sampling.pairs(
        {"id": f"z{stage}-ep{experts}{'-background' * background}", "world_size": 2, "stage": stage, "experts": experts,
         "background": background}
        for stage, experts, background in itertools.product((0, 1, 2), (1, 2), (False, True))
    )  # fmt: skip
    names = {f"experts.deepspeed_moe.experts.deepspeed_experts.{n}.{p}" for n in range(4) for p in ("weight", "bias")}
    for name, ranks in each_on_ranks(_experts, jobs, tmp_path).items():
        for one in ranks:
            assert names < one["recorded"]["weights"].keys() | one["recorded"].get("module", {}).keys(), name
            assert one["proof"].startswith("proven: "), name
            left_out = one["proof"].partition("; not compared: ")[2]
            # DeepSpeed clones the experts that it saves, so that no file has the bytes of the live ones.
            copies = "the module's copies of 8 weights, whose digests were not recorded"
            assert left_out == (copies if name.endswith("background") else ""), name
            assert "deepspeed_experts.3.bias" in one["error"] or left_out, name


def _padding(job: dict[str, Any], directory: Path) -> list[str]:
    """Prove a run without the states of a group of which the last rank has padding alone."""
    import deepspeed
    import torch

    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    net.one = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([{"params": [net.weight, net.bias]}, {"params": [net.one]}])
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": job["stage"]}, "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
    loss = (engine(torch.ones(4, 4, dtype=torch.bfloat16)) * net.one).float().square().mean()
    engine.backward(loss)
    engine.step()
    ckpttool.CheckpointManager(directory / job["id"]).save(engine)
    told = [str(ckpttool.prove(engine, directory / job["id"]))]
    if torch.distributed.get_rank() == 1:
        engine.optimizer.optimizer.state[[*engine.optimizer.optimizer.state][-1]].clear()
    return [*told, engines.refusal(lambda: ckpttool.prove(engine, directory / job["id"]))]


def test_states_of_padding_alone_are_compared(tmp_path: Path) -> None:
    jobs = [{"id": f"z{stage}", "world_size": 2, "stage": stage} for stage in (1, 2)]
    for same, lost in itertools.chain(*each_on_ranks(_padding, jobs, tmp_path).values()):
        assert same.startswith("proven: ")
        assert "exp_avg of one is missing on rank 1" in lost


def _values(job: dict[str, Any], directory: Path) -> str:
    import torch

    from tests.deepspeed.test_matching import _trained
    from tests.extensions.proof.test_comparison import VALUES

    values = {f"v{n}": first for n, (first, _) in enumerate(VALUES)}
    engine = _trained(torch.nn.Linear(8, 8), torch.optim.AdamW, 1)
    manager = ckpttool.CheckpointManager(directory / job["id"], allow=["argparse.Namespace", "decimal.Decimal"])
    manager.save(engine, client_state=values, rank_state=values)
    manager.restore(engine, prove=True)
    assert manager.restored is not None
    return str(manager.restored.proof)


def test_values_of_every_type_that_a_restore_returns_are_proven(tmp_path: Path) -> None:
    for proof in each_on_ranks(_values, [{"id": "a", "world_size": 2}], tmp_path)["a"]:
        assert "client_state, rank_state;" in proof
        assert "not compared" not in proof
