"""Train with Lightning on DeepSpeed: committed saves, a resume on other ranks; load the weights into a plain model.

    torchrun --nproc_per_node=2 examples/lightning_deepspeed.py run out --stage 3 --epochs 4
    torchrun --nproc_per_node=3 examples/lightning_deepspeed.py run out --stage 2 --epochs 6

The second run continues where the first one ended or was killed. Lightning runs DeepSpeed only on GPUs.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import ckpttool
from ckpttool.integrations.lightning import CkptDeepSpeedStrategy, newest_checkpoint

WIDTH, ROWS, GLOBAL_BATCH = 64, 48, 12


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
    """Train on all ranks, from the newest checkpoint if there is one; then the first one loads the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="directory of Lightning's checkpoints")
    parser.add_argument("out", help="directory for the weights")
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(ROWS, WIDTH)
    rows = torch.utils.data.TensorDataset(inputs.bfloat16(), (inputs.roll(1, dims=1) * 0.5).bfloat16())
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(
        devices=ranks,
        strategy=CkptDeepSpeedStrategy(stage=options.stage, async_save=True),
        precision="bf16-true",
        max_epochs=options.epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(options.run, filename="{epoch}", save_top_k=2, monitor="step", mode="max")],
    )
    module = Regression()
    newest = newest_checkpoint(options.run)
    loader = torch.utils.data.DataLoader(rows, batch_size=GLOBAL_BATCH // ranks)
    trainer.fit(module, loader, ckpt_path=newest)
    strategy: Any = trainer.strategy
    strategy.wait()
    engine = strategy.model
    with torch.no_grad():
        given = inputs.to(module.device, torch.bfloat16)
        trained = engine.module.model(given)

    if trainer.is_global_zero:
        saved = newest_checkpoint(options.run) or options.run
        ckpttool.consolidate(saved, options.out, to="safetensors", dtype="bf16", overwrite=True)
        plain = Regression().to(module.device, torch.bfloat16)
        ckpttool.load_state_dict(options.out, dtype="bf16", device=module.device).load_into(plain)
        with torch.no_grad():
            again = plain.model(given)
        print(f"trained from {newest or 'the beginning'} to epoch {trainer.current_epoch}")
        print(f"outputs of the plain model differ by {float((again - trained).abs().max()):.6f}")
    trainer.strategy.barrier()


if __name__ == "__main__":
    main()
