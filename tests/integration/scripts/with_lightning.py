"""Trains with Lightning, which runs forward and backward inside optimizer.step.

Words on the command line add what real training has: ``bf16``, ``clip``, ``evaluate`` (after
every fourth step) and ``save`` (after every eighth).
"""

import hashlib
import os
import sys
import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

wanted = set(sys.argv[1:])


class Model(lightning.LightningModule):
    """A small classifier."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.losses = []

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.losses.append(nn.functional.cross_entropy(self.layers(batch[0]), batch[1]).item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


lightning.seed_everything(0)
model = Model()
ranks = int(os.environ["WORLD_SIZE"])
# An epoch has 8 steps.
data = TensorDataset(torch.randn(64 * ranks, 16), torch.randint(0, 4, (64 * ranks,)))
held_out = TensorDataset(torch.randn(32, 16), torch.randint(0, 4, (32,)))
with tempfile.TemporaryDirectory() as folder:
    saving = ModelCheckpoint(folder, every_n_train_steps=8, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp",
        precision="bf16-mixed" if "bf16" in wanted else "32-true",
        gradient_clip_val=1.0 if "clip" in wanted else None,
        max_steps=16,
        accumulate_grad_batches=2,
        logger=False,
        callbacks=[saving] if "save" in wanted else [],
        enable_checkpointing="save" in wanted,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=8,
        limit_val_batches=1.0 if "evaluate" in wanted else 0,
    )
    trainer.fit(model, DataLoader(data, batch_size=4), DataLoader(held_out, batch_size=4))
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
if trainer.is_global_zero:
    print("weights", hashlib.sha256(weights).hexdigest(), model.losses)
