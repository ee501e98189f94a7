"""Runs of the Hugging Face Trainer on the CPU, forked from one process that has imported it once.

Losses, warnings and folders of each run are in ``facts.json`` of its directory.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from tests import accelerate_on_cpu
from tests.frameworks.killing import kill_at
from tests.frameworks.runs import note_loss, run_jobs

IMPORTED = ("transformers.models.llama.modeling_llama", "transformers.trainer", "ckpttool.integrations.huggingface")
"""What all runs import."""
GLOBAL_BATCH = 6
LINES, WORDS, LENGTH = 24, 32, 8
STEPS, SAVED = 6, 3
"""An epoch has four steps; the save is within it."""


def run(jobs: list[dict[str, Any]]) -> None:
    """Run all jobs, one after another."""
    with contextlib.suppress(ImportError):  # not in transformers 4
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns, or each run does at its first save
    run_jobs(jobs, _train, _forget)


def _forget() -> None:
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    accelerate_on_cpu.forget()


class _Hub:
    """What the Trainer calls of the Hub's client; records the files of each upload, as the Hub is not reachable.

    Args:
        uploads: Receives place and files of each upload.
    """

    def __init__(self, uploads: list[Any]) -> None:
        self._uploads = uploads

    def create_repo(self, name: str, **options: Any) -> Any:
        """Make a repository."""
        from types import SimpleNamespace

        return SimpleNamespace(repo_id=f"someone/{name}")

    def upload_folder(self, *, folder_path: str, path_in_repo: str = "", **options: Any) -> Any:
        """Upload the files of a folder."""
        from concurrent.futures import Future

        names = sorted(os.listdir(folder_path))
        self._uploads.append([path_in_repo, [n for n in names if not n.startswith("checkpoint-")]])
        done: Future[str] = Future()
        done.set_result("")
        return done


def _train(job: dict[str, Any], facts: dict[str, Any]) -> None:
    from transformers import trainer as trainer_module

    os.environ |= job.get("environment", {})
    if job.get("working_directory"):  # the Trainer takes a URL for a path relative to it
        os.chdir(job["out"])
    facts["uploads"] = []
    hub = _Hub(facts["uploads"])
    trainer_module.hf_api = lambda: hub
    trainer_module.create_repo, trainer_module.upload_folder = hub.create_repo, hub.upload_folder  # transformers 4
    trainer = build(job)
    callback = next((one for one in trainer.callback_handler.callbacks if type(one).__name__ == "CkptCallback"), None)
    if job.get("kill"):
        kill_at(job["kill"], job["out"])
    if job.get("notes"):
        trainer.add_callback(_notes(job))
    if job.get("diverge"):
        trainer.add_callback(_divergence(trainer.model))
    result = trainer.train(**({"resume_from_checkpoint": job["resume"]} if "resume" in job else {}))
    facts["global_step"] = result.global_step
    facts["losses"] = {str(e["step"]): e["loss"] for e in trainer.state.log_history if "loss" in e}
    facts["evals"] = {str(e["step"]): e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    facts["best"] = trainer.state.best_model_checkpoint
    if callback is not None and callback.restored is not None:
        assert str(callback.restored.proof).startswith("proven: ")
    facts["restored"] = callback.restored.path if callback is not None and callback.restored is not None else None
    if job.get("evaluate"):
        facts["evaluated"] = trainer.evaluate()["eval_loss"]
    if callback is not None and job.get("again"):
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)
        callback.wait()
        saved = callback.last_save
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)
        callback.wait()
        facts["saved once"] = callback.last_save is saved
    if job.get("push"):
        trainer.push_to_hub()
    if job.get("save_model"):
        trainer.save_model(job["save_model"])


def _notes(job: dict[str, Any]) -> Any:
    """Make a callback that notes each loss."""
    from transformers import TrainerCallback

    class Notes(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                note_loss(job, state.global_step, logs["loss"])

    return Notes()


def _divergence(model: Any) -> Any:
    """Make a callback that changes a weight of the second rank before the first save."""
    import torch
    from transformers import TrainerCallback

    class Divergence(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == SAVED and os.environ["RANK"] == "1":
                with torch.no_grad():
                    model.lm_head.weight[0, 0] += 1.0

    return Divergence()


def tokens() -> Any:
    """The training data: lines that no other line repeats."""
    import torch

    generator = torch.Generator().manual_seed(11)
    return torch.randint(3, WORDS, (LINES, LENGTH), generator=generator)


def _deepspeed(job: dict[str, Any]) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": job["stage"], "stage3_param_persistence_threshold": 40},
        "zero_allow_untested_optimizer": True,
        **job.get("config", {}),
    }
    return {"deepspeed": config}


def _fsdp2(state_dicts: str) -> dict[str, Any]:
    accelerate_on_cpu.run_on_cpu()
    config = {"fsdp_version": 2, "state_dict_type": state_dicts, "reshard_after_forward": True}
    wrapped = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    return {"fsdp": "full_shard", "fsdp_config": {**config, **wrapped}}


def build(job: dict[str, Any]) -> Any:
    """Make the Trainer of a job; with ``callback`` it has a ``CkptCallback`` with these options."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    from ckpttool.integrations.huggingface import CkptCallback

    set_seed(7)
    arguments = TrainingArguments(
        output_dir=job["output_dir"],
        max_steps=job.get("steps", STEPS),
        save_steps=job.get("save_steps", SAVED),
        logging_steps=1,
        learning_rate=job.get("learning_rate", 0.05),
        warmup_steps=2,
        per_device_eval_batch_size=4,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        **(
            _fsdp2(job.get("state_dicts", "SHARDED_STATE_DICT"))
            if job.get("fsdp2")
            else {}
            if job.get("plain")
            else _deepspeed(job)
        ),
        **{
            "optim": "adamw_torch",
            "per_device_train_batch_size": GLOBAL_BATCH // job["world_size"],
            **job.get("arguments", {}),
        },
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=LENGTH,
            attention_dropout=job.get("dropout", 0.0),
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=job.get("tied", False),
        )
    )
    if job.get("peft"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))
        for number in range(1, int(job["peft"])):
            model.add_adapter(f"reference{number}", LoraConfig(r=2, target_modules=["q_proj"]))
    data = [{"input_ids": line, "labels": line} for line in tokens()]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8])
    if job.get("callback") is not None:
        trainer.add_callback(CkptCallback(prove=True, **job["callback"]))
    return trainer
