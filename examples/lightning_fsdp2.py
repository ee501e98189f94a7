"""Train with Lightning on FSDP2: committed saves, a resume on other ranks; load the weights into a plain model.

    torchrun --nproc_per_node=2 examples/lightning_fsdp2.py run out --epochs 4
    torchrun --nproc_per_node=3 examples/lightning_fsdp2.py run out --epochs 6

The second run continues where the first one ended or was killed. It runs on GPUs, or on the CPU.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard

import ckpttool
from ckpttool.integrations.lightning import CkptModelParallelStrategy, newest_checkpoint

WIDTH, ROWS, GLOBAL_BATCH = 64, 48, 12


class Regression(lightning.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        """A small model, as torch makes it."""
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))

    def configure_model(self) -> None:
        """Shard each layer over the ranks."""
        mesh: Any = self.device_mesh
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> Any:
        """The mean square error."""
        given, wanted = batch
        return (self.model(given) - wanted).square().mean()

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train on all ranks, from the newest checkpoint if there is one; then the first one loads the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="directory of Lightning's checkpoints")
    parser.add_argument("out", help="directory for the weights")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(ROWS, WIDTH)
    rows = torch.utils.data.TensorDataset(inputs, inputs.roll(1, dims=1) * 0.5)
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(
        devices=ranks,
        strategy=CkptModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, async_save=True),
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
    with torch.no_grad():
        trained = module.model(inputs.to(module.device))

    if trainer.is_global_zero:
        saved = newest_checkpoint(options.run) or options.run
        ckpttool.consolidate(saved, options.out, to="safetensors", overwrite=True)
        plain = Regression().to(module.device)
        ckpttool.load_state_dict(options.out, device=module.device).load_into(plain)
        with torch.no_grad():
            again = plain.model(inputs.to(module.device))
        print(f"trained from {newest or 'the beginning'} to epoch {trainer.current_epoch}")
        print(f"outputs of the plain model differ by {float((again - trained).abs().max()):.6f}")
    trainer.strategy.barrier()


if __name__ == "__main__":
    main()
