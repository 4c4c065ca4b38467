"""Trains with the Trainer of transformers: random weights, nothing downloaded."""

import hashlib
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    """Random tokens, the same on every rank."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 64, (16,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
# Without dropout, so that another process has the same gradients.
config = GPT2Config(
    n_layer=1,
    n_embd=32,
    n_head=2,
    vocab_size=64,
    n_positions=32,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
model = GPT2LMHeadModel(config)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=16,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.train()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
if trainer.is_world_process_zero():
    print("weights", hashlib.sha256(weights).hexdigest())
