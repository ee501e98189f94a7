"""Train with Lightning's DeepSpeed strategy; make weights of what it saved, and load them into a plain model.

    torchrun --nproc_per_node=2 examples/lightning_deepspeed.py run out --stage 3

Lightning runs DeepSpeed on GPUs alone.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy

import ckpttool

WIDTH, BATCH, EPOCHS = 64, 8, 4


class Regression(lightning.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        """A small model, as torch makes it."""
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: Any, index: int) -> Any:
        """The mean square error."""
        given, wanted = batch
        return (self.model(given).float() - wanted.float()).square().mean()

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train on all ranks; then the first one consolidates what was saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="directory of Lightning's checkpoint")
    parser.add_argument("out", help="directory for the weights")
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(64, WIDTH)
    rows = torch.utils.data.TensorDataset(inputs.bfloat16(), (inputs.roll(1, dims=1) * 0.5).bfloat16())
    trainer = lightning.Trainer(
        devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=DeepSpeedStrategy(stage=options.stage),
        precision="bf16-true", max_epochs=EPOCHS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Regression()
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=BATCH))
    trainer.save_checkpoint(options.run)
    engine: Any = trainer.strategy.model
    with torch.no_grad():
        given = inputs.to(module.device, torch.bfloat16)
        trained = engine.module.model(given)

    if trainer.is_global_zero:
        ckpttool.consolidate(options.run, options.out, to="safetensors", dtype="bf16")
        plain = Regression().to(module.device, torch.bfloat16)
        ckpttool.load_state_dict(options.out, dtype="bf16", device=module.device).load_into(plain)
        with torch.no_grad():
            again = plain.model(given)
        print(f"outputs of the plain model differ by {float((again - trained).abs().max()):.6f}")
    trainer.strategy.barrier()


if __name__ == "__main__":
    main()
