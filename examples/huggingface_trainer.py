"""Fine-tune with the Hugging Face Trainer: committed saves, a resume on other ranks, exported weights.

    torchrun --nproc_per_node=2 examples/huggingface_trainer.py run out --stage 3 --steps 12
    torchrun --nproc_per_node=3 examples/huggingface_trainer.py run out --stage 2 --steps 24

The second run continues where the first one ended or was killed. ``--strategy fsdp2`` and ``--strategy ddp`` take the
place of DeepSpeed, and each continues a run of the others. On a machine without a GPU: DS_ACCELERATOR=cpu torchrun ...;
Accelerate has FSDP2 only on GPUs. The model is tiny and random, its data generated: replace them by
``from_pretrained`` and real text.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ckpttool.integrations.huggingface import CkptCallback

WORDS, LENGTH, LINES, GLOBAL_BATCH = 32, 16, 72, 12
MODEL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def of_strategy(strategy: str, stage: int) -> dict[str, Any]:
    """The arguments of the Trainer; it needs none for DDP."""
    if strategy == "deepspeed":
        return {
            "deepspeed": {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_clipping": "auto",
                "bf16": {"enabled": "auto"},
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            }
        }
    if strategy == "fsdp2":
        config = {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT", "reshard_after_forward": True}
        return {"fsdp": True, "fsdp_config": config}
    return {}


def main() -> None:
    """Train on all ranks, from the newest checkpoint if there is one; then load the exported weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="directory of the Trainer's checkpoints")
    parser.add_argument("out", help="directory of the exported weights")
    parser.add_argument("--strategy", default="deepspeed", choices=("deepspeed", "fsdp2", "ddp"))
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3), help="of DeepSpeed")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--fp32", action="store_true", help="train in fp32; default: bf16")
    options = parser.parse_args()

    cpu = not torch.cuda.is_available()
    if cpu and options.strategy == "deepspeed":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    set_seed(0)
    tokens = (torch.arange(LINES)[:, None] + torch.arange(LENGTH)) % (WORDS - 3) + 3  # they count upwards
    data = [{"input_ids": line, "labels": line} for line in tokens]
    arguments = TrainingArguments(  # before the model: at stage 3 it is then built in pieces
        output_dir=options.run,
        max_steps=options.steps,
        save_steps=6,
        logging_steps=6,
        save_total_limit=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=GLOBAL_BATCH // int(os.environ["WORLD_SIZE"]),
        optim="adamw_torch",
        bf16=not options.fp32,
        report_to=[],
        disable_tqdm=True,
        use_cpu=cpu,
        ddp_backend="gloo" if cpu else None,
        **of_strategy(options.strategy, options.stage),
    )
    trainer = Trainer(
        model=LlamaForCausalLM(LlamaConfig(**MODEL)), args=arguments, train_dataset=data, eval_dataset=data
    )
    callback = CkptCallback(async_save=True, auto_resume=True, export_every=options.steps, export_to=options.out)
    trainer.add_callback(callback)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]

    if trainer.is_world_process_zero():
        resumed = (
            f"resumed from step {callback.restored.step}" if callback.restored is not None else "started at step 0"
        )
        unset_hf_deepspeed_config()  # else, at stage 3, from_pretrained waits for the other ranks to split the model
        model = LlamaForCausalLM.from_pretrained(f"{options.out}/checkpoint-{options.steps}").to(arguments.device)
        with torch.no_grad():
            batch = tokens.to(arguments.device)
            again = float(model(input_ids=batch, labels=batch).loss)
        print(f"{resumed}; loss while training {loss:.4f}, loaded back {again:.4f}")


if __name__ == "__main__":
    main()
