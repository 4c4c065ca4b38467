"""Trains with Lightning, which runs forward and backward inside optimizer.step."""

import hashlib

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    """A small classifier."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


lightning.seed_everything(0)
model = Model()
data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_steps=16,
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(data, batch_size=4))
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
if trainer.is_global_zero:
    print("weights", hashlib.sha256(weights).hexdigest())
