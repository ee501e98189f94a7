"""A Llama under Ray Train: trained, killed, resumed, exported, and compared with the live model.

    python examples/ray_llama.py /data/llama --gpu                # 1.1B parameters with random weights, on one GPU
    python examples/ray_llama.py /tmp/llama --tiny --steps 12     # the same on the CPU

The worker is killed between two saves. Ray starts another one, which continues from the newest commit. The weights are
exported with one call, loaded by transformers, and must give the logits of the engine that trained them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

LARGE = {
    "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
TINY = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
LENGTH, BATCH = 128, 4
PROMPT = "The checkpoint of the last step"


def llama_config(sizes: dict[str, int]) -> Any:
    """Return the configuration of the model."""
    from transformers import LlamaConfig

    return LlamaConfig(**sizes, max_position_embeddings=LENGTH, attn_implementation="eager", use_cache=False)


def train_func(config: dict[str, Any]) -> None:
    """Train on this worker; in the first attempt, die between two saves."""
    import deepspeed
    import torch
    from transformers import LlamaForCausalLM

    from ckpttool.integrations import ray_train

    cuda = torch.cuda.is_available()
    if not cuda:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed()
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = LlamaForCausalLM(llama_config(config["sizes"])).bfloat16()
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    adam = deepspeed.ops.adam.FusedAdam if cuda else torch.optim.AdamW
    engine, *_ = deepspeed.initialize(model=model, config=settings, optimizer=adam(model.parameters(), lr=2e-4))
    began = time.perf_counter()
    state = ray_train.restore(engine) or {"step": 0}
    tell(config, event="start", step=state["step"], seconds=round(time.perf_counter() - began, 2))
    text = torch.tensor(list(Path(config["text"]).read_bytes()))
    for step in range(state["step"], config["steps"]):
        if step == config["die_at"] and not state["step"]:
            os.kill(os.getpid(), signal.SIGKILL)
        numbers = torch.Generator().manual_seed(step)
        places = torch.randint(0, len(text) - LENGTH, (BATCH,), generator=numbers)
        tokens = torch.stack([text[p : p + LENGTH] for p in places]).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if (step + 1) % config["save_every"] == 0:
            began = time.perf_counter()
            ray_train.report(engine, {"loss": float(loss.detach())}, client_state={"step": step + 1})
            tell(config, event="save", step=step + 1, loss=float(loss.detach()), seconds=time.perf_counter() - began)
    torch.save(answer(engine.module, engine.device), config["answer"])


def answer(model: Any, device: Any) -> dict[str, Any]:
    """Return the logits of a prompt, and the bytes that greedy decoding adds to it."""
    import torch

    model.eval()
    tokens = torch.tensor([list(PROMPT.encode())], device=device)
    with torch.no_grad():
        logits = model(tokens).logits.cpu()
        for _ in range(24):
            following = model(tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
    return {"logits": logits, "tokens": tokens.cpu()}


def tell(config: dict[str, Any], **event: Any) -> None:
    """Log an event."""
    with open(config["log"], "a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def fit(config: dict[str, Any], storage: str, *, gpu: bool) -> Any:
    """Train on one worker, which Ray starts again if it dies."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1, use_gpu=gpu),
        run_config=RunConfig(
            name="llama",
            storage_path=storage,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=1),
        ),
    )
    return trainer.fit()


def export(root: str, out: str, sizes: dict[str, int]) -> None:
    """Write the weights for ``from_pretrained``, with the model's configuration beside them."""
    import ckpttool

    report = ckpttool.consolidate(root, out, to="safetensors", dtype="bf16")
    llama_config(sizes).save_pretrained(out)
    print(f"exported {report.elements:,} elements in {report.written.seconds:.2f} s")


def main() -> None:
    """Train, and compare the export with the live model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    import ray
    import torch
    from transformers import LlamaForCausalLM

    directory = Path(options.directory).absolute()
    directory.mkdir(parents=True)
    sizes = TINY if options.tiny else LARGE
    every = max(1, options.steps // 2)
    config = {
        "sizes": sizes,
        "steps": options.steps,
        "save_every": every,
        "die_at": every + max(1, every // 4),
        "text": os.path.abspath(__file__),
        "answer": str(directory / "answer.pt"),
        "log": str(directory / "events.jsonl"),
    }
    ray.init(include_dashboard=False, num_gpus=int(options.gpu), logging_level="error", log_to_driver=False)
    result = fit(config, str(directory / "runs"), gpu=options.gpu)
    print((directory / "events.jsonl").read_text(), end="")
    export(result.checkpoint.path, str(directory / "weights"), sizes)
    device = "cuda" if options.gpu else "cpu"
    model = LlamaForCausalLM.from_pretrained(directory / "weights", dtype=torch.bfloat16, attn_implementation="eager")
    # DeepSpeed computes with the buffers of the rotary embedding in bf16 too.
    live, found = torch.load(directory / "answer.pt"), answer(model.bfloat16().to(device), device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    print(f"generated: {bytes(found['tokens'][0].clamp(max=255).tolist())!r}")
    if not torch.equal(live["logits"], found["logits"]) or not torch.equal(live["tokens"], found["tokens"]):
        raise SystemExit("the exported model does not give the logits of the engine")
    print(f"the {found['logits'].numel():,} logits equal the engine's, bit for bit")


if __name__ == "__main__":
    main()
