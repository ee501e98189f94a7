"""The Hugging Face Trainer with ``CkptCallback``, on real engines: saves, resumes on other ranks, kills, exports."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import ckpttool
from ckpttool.storage import MANIFEST
from tests import sampling
from tests.extensions.huggingface import trainer_runs
from tests.extensions.huggingface.trainer_runs import SAVED, STEPS
from tests.frameworks.jobs import Jobs
from tests.frameworks.torn import flip, tear
from tests.storage import server

if TYPE_CHECKING:
    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed
SAME = sampling.some([3, 2], 1)
"""Stages of resumes on the same ranks."""
OTHERS = sampling.some([(2, 1, 3), (2, 3, 2), (3, 1, 2), (3, 3, 3)], 1)
"""Resumes on other ranks: stage that saved on two ranks, ranks, stage that resumes."""
WITHOUT_ZERO = sampling.some(
    [
        ("peft0-again", "peft0", 0, 2), ("peft0-alone", "peft0-without", 0, 1), ("peft0-to2", "peft0-without", 2, 1),
        ("plain2-to0", "plain2", 0, 2), ("plain3-to0", "plain3", 0, 1), ("peft-to0", "peft", 0, 1),
    ],
    2,
)  # fmt: skip
"""Resumes from or at stage 0: name, run that saved on two ranks, stage, ranks."""
KILLS = [
    {"rank": 0, "number": 1, "everyone": False},  # before the in-progress marker
    {"rank": 1, "number": 2, "everyone": False},
    {"rank": 0, "number": 4, "everyone": True},
    {"rank": 1, "number": 3, "everyone": True},
]
KILLED = sampling.some(range(len(KILLS)), 1, key="kills")
"""Indexes of the kills that are tried."""


def _first_jobs(jobs: Jobs, endpoint: str) -> None:
    for stage in SAME:
        jobs.add(f"dropout{stage}", stage, 2, dropout=0.5)
    for stage in (2, 3):
        jobs.add(f"plain{stage}", stage, 2)
    jobs.add("without", 2, 2, callback=None)
    accumulating = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    jobs.add("accumulating", 2, 1, arguments=accumulating, config={"gradient_accumulation_steps": "auto"})
    best = {**_only_best(), "save_total_limit": 2}
    jobs.add(
        "best", 3, 2, steps=5, save_steps=1, learning_rate=0.3, arguments=best, evaluate=True,
        callback={"async_save": True, "export_every": 2}, save_model=str(jobs.directory / "best" / "weights"),
    )  # fmt: skip
    pushed = {"push_to_hub": True, "hub_strategy": "checkpoint", "hub_always_push": True}
    jobs.add("hub", 3, 2, steps=2, save_steps=1, arguments=pushed, push=True)
    for name, root in _best_roots(jobs).items():
        jobs.add(name, 2, 2, steps=2, **_best_run(name, root, endpoint))
    bucket = {"root": "s3://runs/trainer", "storage_options": {"endpoint_url": endpoint}, "export_every": 4}
    jobs.add(
        "bucket", 2, 2, steps=4, save_steps=1, learning_rate=0.3, arguments=best, evaluate=True,
        callback={**bucket, "async_save": True}, environment=server.ENVIRONMENT, again=True,
    )  # fmt: skip
    jobs.add(
        "peft", 3, 2, peft=True, callback={"export_every": SAVED}, arguments={"save_total_limit": 5},
        save_model=str(jobs.directory / "peft" / "run"),
    )  # fmt: skip
    jobs.add("peft0", 0, 2, peft=True, dropout=0.5)
    jobs.add("peft0-without", 0, 2, peft=True, callback=None)
    for number in KILLED:
        point = {**KILLS[number], "step": STEPS}
        jobs.add(f"killed{number}", 2 + number % 2, 2, kill=point, callback={"timeout": 5.0}, fails=True)


def _only_best() -> dict[str, Any]:
    """Arguments of a run that evaluates each step and keeps the best checkpoint."""
    return {
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1,
        "eval_strategy": "steps", "eval_steps": 1, "lr_scheduler_type": "constant",
    }  # fmt: skip


BEST_ROOTS = sampling.some(["bucket-falling", "beside-rising", "inside-rising", "bucket-rising"], 2)
"""Runs that keep the best checkpoint: where it lies, in or beside the Trainer's output, and how the losses go."""


def _best_roots(jobs: Jobs) -> dict[str, str]:
    places = {
        "bucket-falling": "s3://runs/falling", "beside-rising": str(jobs.directory / "beside"),
        "bucket-rising": "s3://runs/rising", "inside-rising": str(jobs.directory / "inside-rising" / "run"),
    }  # fmt: skip
    return {name: places[name] for name in BEST_ROOTS}


def _best_run(name: str, root: str, endpoint: str) -> dict[str, Any]:
    options = {"root": root, "storage_options": {"endpoint_url": endpoint} if "://" in root else None}
    return {
        "save_steps": 1, "arguments": _only_best(), "callback": options, "environment": server.ENVIRONMENT,
        "learning_rate": 0.01 if name.endswith("falling") else 2.0,
    }  # fmt: skip


def _copied(jobs: Jobs, source: str, name: str) -> None:
    """Give a run the first checkpoint of another."""
    shutil.copytree(
        jobs.directory / source / "run" / f"checkpoint-{SAVED}", jobs.directory / name / "run" / f"checkpoint-{SAVED}"
    )


def _resumes(jobs: Jobs, endpoint: str) -> None:
    bucket = {"root": "s3://runs/trainer", "storage_options": {"endpoint_url": endpoint}, "auto_resume": True}
    jobs.add(
        "from-bucket", 3, 1, learning_rate=0.3, callback=bucket, environment=server.ENVIRONMENT,
        output_dir=str(jobs.directory / "bucket" / "run"),
    )  # fmt: skip
    for name, root in _best_roots(jobs).items():
        output_dir = str(jobs.directory / name / "run")
        values = {**_best_run(name, root, endpoint), "output_dir": output_dir, "evaluate": True}
        jobs.add(f"{name}-again", 2, 2, steps=4, resume=True, **values)
    jobs.add("peft-again", 2, 1, peft=True, resume=True)
    _copied(jobs, "peft", "peft-again")
    for name, source, stage, ranks in WITHOUT_ZERO:
        jobs.add(name, stage, ranks, peft=source.startswith("peft"), dropout=0.5 * (source == "peft0"), resume=True)
        _copied(jobs, source, name)
    jobs.add("other-optimizer", 2, 2, resume=True, arguments={"optim": "sgd"}, fails=True)
    _copied(jobs, "plain2", "other-optimizer")
    for stage in SAME:
        jobs.add(f"again{stage}", stage, 2, dropout=0.5, resume=True)
        _copied(jobs, f"dropout{stage}", f"again{stage}")
    jobs.add("by-trainer", SAME[0], 2, dropout=0.5, callback=None, resume=True)
    _copied(jobs, f"dropout{SAME[0]}", "by-trainer")
    for saved, ranks, stage in OTHERS:
        name = f"from{saved}-to{stage}-dp{ranks}"
        jobs.add(name, stage, ranks, resume=True)
        _copied(jobs, f"plain{saved}", name)
    jobs.add("from-trainer", 3, 1, resume=True)
    _copied(jobs, "without", "from-trainer")
    for number in KILLED:
        killed = jobs.directory / f"killed{number}"
        ranks = (1, 2, 3, 2)[number]
        given = str(killed / "run" / f"checkpoint-{STEPS}") if number == 1 else True  # as get_last_checkpoint finds it
        jobs.add(f"revived{number}", 2 + number % 2, ranks, resume=given, output_dir=str(killed / "run"))
    for stage in SAME:
        name = f"flipped{stage}"
        jobs.add(name, stage, 2, callback={"auto_resume": True})
        shutil.copytree(jobs.directory / f"plain{stage}" / "run", jobs.directory / name / "run")
        flip(jobs.directory / name / "run" / f"checkpoint-{STEPS}")
    jobs.add("none", 2, 1, resume=True, fails=True)
    jobs.add("only-model", 2, 1, arguments={"save_only_model": True}, fails=True)
    url = {"output_dir": "s3://runs/url", "working_directory": True, "fails": True}
    jobs.add("url", 2, 1, **url)
    jobs.add("url-and-root", 2, 1, callback={"root": str(jobs.directory / "url-root")}, **url)
    jobs.add("begins", 2, 1, steps=1, callback={"auto_resume": True})
    jobs.add("mistyped", 2, 1, resume=str(jobs.directory / "elsewhere" / f"checkpoint-{SAVED}"), fails=True)
    _copied(jobs, "plain2", "mistyped")
    jobs.add("foreign", 2, 1, callback={"auto_resume": True}, fails=True)
    foreign = jobs.directory / "foreign" / "run" / f"checkpoint-{SAVED}"
    foreign.mkdir(parents=True)
    (foreign / "model.safetensors").write_bytes(b"weights")
    options = {"storage_options": {"endpoint_url": endpoint}}
    jobs.add(
        "from-url", 2, 1, learning_rate=0.3, resume="s3://runs/trainer/checkpoint-4", callback=options,
        environment=server.ENVIRONMENT,
    )  # fmt: skip
    jobs.add("torn", 2, 1, resume=True, fails=True)
    _copied(jobs, "plain2", "torn")
    tear(jobs.directory / "torn" / "run" / f"checkpoint-{SAVED}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    """The facts of all runs, by name."""
    directory = tmp_path_factory.mktemp("trainer")
    with server.running() as endpoint:
        server.client(endpoint).create_bucket(Bucket="runs")
        jobs = Jobs(trainer_runs, directory, lambda out: {"output_dir": str(out / "run"), "callback": {}})
        _first_jobs(jobs, endpoint)
        found = jobs.run()
        _resumes(jobs, endpoint)
        found |= jobs.run()
        listed = server.client(endpoint).list_objects_v2(Bucket="runs")
    found["bucket"]["keys"] = [entry["Key"] for entry in listed["Contents"]]
    return found


def _rest(losses: dict[str, float]) -> dict[str, float]:
    return {step: loss for step, loss in losses.items() if int(step) > SAVED}


@pytest.mark.parametrize("stage", SAME)
def test_a_resume_on_the_same_ranks_has_the_losses_of_a_run_that_did_not_stop(runs: dict[str, Any], stage: int) -> None:
    whole, resumed = runs[f"dropout{stage}"]["losses"], runs[f"again{stage}"]["losses"]
    assert len(_rest(resumed)) == STEPS - SAVED
    assert _rest(resumed) == _rest(whole)


@pytest.mark.parametrize(("saved", "ranks", "stage"), OTHERS)
def test_a_resume_on_other_ranks_and_stages_goes_on(runs: dict[str, Any], saved: int, ranks: int, stage: int) -> None:
    whole, resumed = runs[f"plain{saved}"]["losses"], runs[f"from{saved}-to{stage}-dp{ranks}"]["losses"]
    assert list(_rest(resumed)) == list(_rest(whole))
    assert list(_rest(resumed).values()) == pytest.approx(list(_rest(whole).values()), rel=1e-5)


def test_the_trainer_resumes_from_a_commit_without_the_callback(runs: dict[str, Any]) -> None:
    assert _rest(runs["by-trainer"]["losses"]) == _rest(runs[f"dropout{SAME[0]}"]["losses"])


def test_a_save_of_the_trainer_without_the_callback_is_resumed_on_other_ranks(runs: dict[str, Any]) -> None:
    resumed, whole = _rest(runs["from-trainer"]["losses"]), _rest(runs["without"]["losses"])
    assert list(resumed.values()) == pytest.approx(list(whole.values()), rel=1e-5)


def test_no_save_of_the_trainer_is_between_two_micro_batches(runs: dict[str, Any]) -> None:
    assert ckpttool.inspect(runs["accumulating"]["out"] / "run" / f"checkpoint-{SAVED}").step == SAVED
    assert not any("micro batches" in line for line in runs["accumulating"]["told"])


def test_a_save_has_the_files_of_the_trainer_except_the_weights(runs: dict[str, Any]) -> None:
    ours, theirs = (
        {str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()}
        for f in (runs[name]["out"] / "run" / f"checkpoint-{SAVED}" for name in ("plain2", "without"))
    )
    assert theirs - ours == {"model.safetensors"}
    added = {name.rpartition("/")[2] for name in ours - theirs}
    assert added == {MANIFEST, "ckpttool_rank_state_00000.pt", "ckpttool_rank_state_00001.pt"}
    assert not ckpttool.verify(runs["plain3"]["out"] / "run" / f"checkpoint-{SAVED}", deep=True).findings


def test_limits_and_the_best_model_work_with_saves_in_the_background(runs: dict[str, Any]) -> None:
    facts = runs["best"]
    evals = facts["evals"]
    best = min(evals, key=lambda step: evals[step])
    assert facts["best"] == str(facts["out"] / "run" / f"checkpoint-{best}")
    assert facts["evaluated"] == evals[best]
    left = {p.name for p in (facts["out"] / "run").iterdir()}
    assert left == {f"checkpoint-{best}", "checkpoint-5" if best != "5" else "checkpoint-4"}


def test_weights_come_from_a_commit_without_a_gather(runs: dict[str, Any]) -> None:
    from transformers import LlamaForCausalLM

    facts = runs["best"]
    model = LlamaForCausalLM.from_pretrained(facts["out"] / "weights").eval()
    best = Path(facts["best"])
    truth = ckpttool.load_state_dict(best)
    held = model.state_dict()
    assert all(torch.equal(held[name], truth[name]) for name in truth)
    assert sorted(p.name for p in (facts["out"] / "weights").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "training_args.bin",
    ]  # fmt: skip


@pytest.mark.parametrize("number", KILLED)
def test_a_run_killed_in_a_save_goes_on_from_the_save_before(runs: dict[str, Any], number: int) -> None:
    killed, revived = runs[f"killed{number}"], runs[f"revived{number}"]
    assert -9 in killed["statuses"]
    assert revived["restored"].endswith(f"checkpoint-{SAVED}/global_step{SAVED}")
    torn = killed["out"] / "run" / f"checkpoint-{STEPS}"
    if number:  # the first kill leaves an empty directory
        assert any(str(torn) in line and "was not committed" in line for line in revived["told"]), revived["told"]
    whole = _rest(runs[f"plain{2 + number % 2}"]["losses"])
    assert list(_rest(revived["losses"]).values()) == pytest.approx(list(whole.values()), rel=1e-5)
    assert not ckpttool.verify(torn, deep=True).findings


@pytest.mark.parametrize("stage", SAME)
def test_a_damaged_checkpoint_is_passed_over_and_named(runs: dict[str, Any], stage: int) -> None:
    facts = runs[f"flipped{stage}"]
    assert facts["restored"].endswith(f"checkpoint-{SAVED}/global_step{SAVED}")
    assert any(f"checkpoint-{STEPS}" in line and "trying the one before" in line for line in facts["told"])
    whole = runs[f"plain{stage}"]["losses"]
    assert _rest(facts["losses"]) == _rest(whole)
    folder = facts["out"] / "run" / f"checkpoint-{STEPS}"
    assert (folder / f"global_step{STEPS}.damaged").is_dir(), "the save of its step moved it aside"
    assert not ckpttool.verify(folder, deep=True).findings


def test_without_a_whole_checkpoint_a_resume_says_so(runs: dict[str, Any]) -> None:
    assert runs["none"]["error"].startswith("ValueError: No valid checkpoint found in output directory")
    assert runs["begins"]["losses"].keys() == {"1"}
    assert "holds 1 checkpoints, and none was committed" in runs["torn"]["error"]
    assert os.linesep not in runs["torn"]["error"]


def test_a_mistyped_checkpoint_is_not_replaced_by_one_of_the_same_name(runs: dict[str, Any]) -> None:
    assert f"elsewhere/checkpoint-{SAVED}: does not exist" in runs["mistyped"]["error"]
    assert not (runs["mistyped"]["out"] / "run" / f"checkpoint-{STEPS}").exists()


def test_a_run_does_not_begin_anew_over_checkpoints_of_another_kind(runs: dict[str, Any]) -> None:
    foreign = runs["foreign"]["out"] / "run" / f"checkpoint-{SAVED}"
    assert f"{foreign}: holds model.safetensors, but no checkpoint" in runs["foreign"]["error"]
    assert (foreign / "model.safetensors").read_bytes() == b"weights"


def test_a_run_on_disk_resumes_from_a_bucket(runs: dict[str, Any]) -> None:
    assert runs["from-url"]["restored"] == "s3://runs/trainer/checkpoint-4/global_step4"
    resumed, whole = runs["from-url"]["losses"], runs["from-bucket"]["losses"]
    assert resumed == pytest.approx(whole, rel=1e-5)  # at stage 2 and at stage 3, which round otherwise
    assert (runs["from-url"]["out"] / "run" / f"checkpoint-{STEPS}").is_dir()


def test_saves_of_weights_alone_are_refused_before_the_training(runs: dict[str, Any]) -> None:
    assert "cannot save only weights: save_only_model is on; leave it out" in runs["only-model"]["error"]
    assert not list((runs["only-model"]["out"] / "run").glob("checkpoint-*"))


@pytest.mark.parametrize("name", ["url", "url-and-root"])
def test_an_output_directory_in_a_bucket_is_refused(runs: dict[str, Any], name: str) -> None:
    hint = "pass a local directory, and the URL to CkptCallback"
    assert runs[name]["error"] == (
        f"ArgumentError: output_dir: is s3://runs/url, but the Trainer writes to local disk; {hint}"
    )
    assert not [p for p in runs[name]["out"].rglob("*") if p.name != "facts.json" and not p.is_dir()]


def test_pushes_to_the_hub_have_the_weights(runs: dict[str, Any]) -> None:
    uploads = runs["hub"]["uploads"]
    places = [place for place, _ in uploads]
    assert places == ["", "last-checkpoint", "", "last-checkpoint", ""]
    for place, names in uploads:
        assert "model.safetensors" in names, (place, names)
        assert ("trainer_state.json" in names) == bool(place)
    assert ".ckpttool-weights" not in os.listdir(runs["hub"]["out"] / "run")


def test_a_bucket_holds_the_run_with_its_limit_and_its_best_model(runs: dict[str, Any]) -> None:
    facts = runs["bucket"]
    best = min(facts["evals"], key=lambda step: facts["evals"][step])
    assert facts["evaluated"] == facts["evals"][best]
    assert facts["saved once"], "a bucket cannot replace a checkpoint as a whole"
    folders = {key.split("/")[1] for key in facts["keys"] if key.startswith("trainer/") and "/export/" not in key}
    steps = {int(name.removeprefix("checkpoint-")) for name in folders}
    assert {STEPS, int(best)} <= steps | {4}
    assert "trainer/export/checkpoint-4/model.safetensors" in facts["keys"]


def test_a_run_in_a_bucket_goes_on_where_no_local_file_is_left(runs: dict[str, Any]) -> None:
    facts = runs["from-bucket"]
    assert facts["restored"] == "s3://runs/trainer/checkpoint-4/global_step4"
    assert list(facts["losses"]) == ["1", "2", "3", "4", "5", "6"]
    before = runs["bucket"]["losses"]
    assert {step: facts["losses"][step] for step in before} == before


def test_adapters_are_resumed_and_exported(runs: dict[str, Any]) -> None:
    resumed, whole = runs["peft-again"]["losses"], runs["peft"]["losses"]
    assert list(_rest(resumed).values()) == pytest.approx(list(_rest(whole).values()), rel=1e-5)
    names = {p.name for p in (runs["peft"]["out"] / "run" / f"checkpoint-{SAVED}").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names


@pytest.mark.parametrize("name", BEST_ROOTS)
def test_a_resumed_run_keeps_the_best_checkpoint_wherever_it_lies(runs: dict[str, Any], name: str) -> None:
    facts, run = runs[f"{name}-again"], runs[name]["out"] / "run"
    assert list(facts["evals"]) == ["1", "2", "3", "4"]
    best = min(facts["evals"], key=lambda step: facts["evals"][step])
    assert (int(best) > 2) == name.endswith("falling")
    assert facts["best"] == str(run / f"checkpoint-{best}")
    assert facts["evaluated"] == facts["evals"][best]
    kept = {f"checkpoint-{best}", "checkpoint-4"}
    assert {p.name for p in run.glob("checkpoint-*")} == (kept if name.startswith("inside") else set())
    if name.startswith("beside"):
        assert {p.name for p in (run.parent.parent / "beside").iterdir()} == kept
    if name.startswith("bucket"):
        prefix = f"{name.partition('-')[2]}/"
        assert {key.split("/")[1] for key in runs["bucket"]["keys"] if key.startswith(prefix)} == kept


@pytest.mark.parametrize(("name", "source", "stage", "ranks"), WITHOUT_ZERO)
def test_runs_go_on_at_stage_0_and_from_there(
    runs: dict[str, Any], name: str, source: str, stage: int, ranks: int
) -> None:
    resumed, whole = _rest(runs[name]["losses"]), _rest(runs[source]["losses"])
    if name == "peft0-again":
        assert resumed == whole
    assert list(resumed.values()) == pytest.approx(list(whole.values()), rel=1e-5)


def test_a_hint_names_what_the_trainer_can_do(runs: dict[str, Any]) -> None:
    error = runs["other-optimizer"]["error"]
    hint = "build the same optimizer as in the saved run, or start a new run from its weights, "
    assert error.endswith(f"; {hint}which ckpttool.consolidate writes")


def test_save_model_writes_a_whole_adapter_and_nothing_else_changes(runs: dict[str, Any]) -> None:
    run = runs["peft"]["out"] / "run"
    saved = load_file(run / "adapter_model.safetensors")
    committed = load_file(run / f"checkpoint-{SAVED}" / "adapter_model.safetensors")
    assert saved.keys() == committed.keys()
    assert any("lm_head" in name for name in saved)  # modules_to_save
    truth = ckpttool.load_state_dict(run / f"checkpoint-{STEPS}", dtype="fp32")
    for name, tensor in saved.items():
        layer, _, kind = name.rpartition(".")
        full = name if name in truth else f"{layer}.default.{kind}"
        full = full if full in truth else f"{layer}.modules_to_save.default.{kind}"
        assert torch.equal(tensor.float(), truth[full].to(tensor.dtype).float()), name
