"""Trains with the Trainer of transformers: random weights, nothing downloaded.

Words on the command line add what real training has: ``bf16``, ``evaluate`` (after every fourth
step) and ``save`` (after every sixth). Trainer clips gradients unless ``unclipped``.
"""

import hashlib
import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

wanted = set(sys.argv[1:])


class Tokens(Dataset):
    """Random tokens, the same on every rank."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

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
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        bf16="bf16" in wanted,
        max_grad_norm=0.0 if "unclipped" in wanted else 1.0,
        eval_strategy="steps" if "evaluate" in wanted else "no",
        eval_steps=4,
        save_strategy="steps" if "save" in wanted else "no",
        save_steps=6,
        logging_strategy="steps",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        # An epoch has 6 steps at 2 ranks.
        train_dataset=Tokens(192),
        eval_dataset=Tokens(32),
    )
    trainer.train()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
if trainer.is_world_process_zero():
    history = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history]
    print("weights", hashlib.sha256(weights).hexdigest(), history)
