"""Fine-tune with the Hugging Face Trainer on DeepSpeed; make weights of its checkpoint, and load them back.

    torchrun --nproc_per_node=2 examples/huggingface_trainer.py run out --stage 3

On a machine without a GPU: DS_ACCELERATOR=cpu torchrun ... The model is tiny and random, its data made on the spot: put
``from_pretrained`` and real text in their places.
"""

from __future__ import annotations

import argparse
import os

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ckpttool

WORDS, LENGTH, LINES, STEPS = 32, 16, 64, 20
MODEL = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def main() -> None:
    """Train on all ranks; then the first one consolidates what was saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="directory of the Trainer's checkpoints")
    parser.add_argument("out", help="directory for the weights")
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    options = parser.parse_args()

    cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    if cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    set_seed(0)
    tokens = (torch.arange(LINES)[:, None] + torch.arange(LENGTH)) % (WORDS - 3) + 3  # they count upwards
    data = [{"input_ids": line, "labels": line} for line in tokens]
    arguments = TrainingArguments(  # before the model: at stage 3 it is then built in pieces
        output_dir=options.run, max_steps=STEPS, save_steps=STEPS, learning_rate=1e-2, per_device_train_batch_size=4,
        optim="adamw_torch", bf16=True, report_to=[], disable_tqdm=True,
        use_cpu=cpu, ddp_backend="gloo" if cpu else None,
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": options.stage}, "zero_allow_untested_optimizer": True,
        },
    )  # fmt: skip
    trainer = Trainer(
        model=LlamaForCausalLM(LlamaConfig(**MODEL)), args=arguments, train_dataset=data, eval_dataset=data
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]

    if trainer.is_world_process_zero():
        # The directory as the Trainer wrote it; config.json comes along, so that from_pretrained finds all it needs.
        written = ckpttool.consolidate(f"{options.run}/checkpoint-{STEPS}", options.out, to="safetensors", dtype="bf16")
        unset_hf_deepspeed_config()  # else, at stage 3, from_pretrained waits for the other ranks to split the model
        model = LlamaForCausalLM.from_pretrained(options.out).to(arguments.device)
        with torch.no_grad():
            batch = tokens.to(arguments.device)
            again = float(model(input_ids=batch, labels=batch).loss)
        print(f"exported {written.nbytes_written:,} bytes; loss while training {loss:.4f}, loaded back {again:.4f}")


if __name__ == "__main__":
    main()
