"""A training script that knows nothing of ckpttool, as users have them: it resumes from ``get_last_checkpoint``."""

from __future__ import annotations

import os
import sys

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
run, steps, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
set_seed(0)
arguments = TrainingArguments(
    output_dir=run,
    max_steps=steps,
    save_steps=2,
    logging_steps=1,
    per_device_train_batch_size=6 // int(os.environ["WORLD_SIZE"]),
    use_cpu=True,
    ddp_backend="gloo",
    report_to=[],
    disable_tqdm=True,
    optim="adamw_torch",
    deepspeed={
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    },
)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
)
tokens = torch.randint(3, 32, (24, 8), generator=torch.Generator().manual_seed(1))
trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": t, "labels": t} for t in tokens])
last = get_last_checkpoint(run) if how == "last" and os.path.isdir(run) else None
trainer.train(resume_from_checkpoint=last)
if trainer.is_world_process_zero():
    logged = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    names = [type(one).__name__ for one in trainer.callback_handler.callbacks]
    sys.stdout.write(f"steps {logged} callbacks {names} beside {os.path.basename(sys.path[0])}\n")
