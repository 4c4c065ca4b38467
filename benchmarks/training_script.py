#!/usr/bin/env python3
"""A training script as people write them, in four kinds; it knows nothing of the profiler.

The same training in plain PyTorch, with Accelerate, with the Trainer of transformers and with
Lightning: the timed model (layers that sleep), its data, loss and optimizer. Started with
torchrun, by benchmarks/scripts.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from ddp_profiler.workload import Workload, build


class WithLoss(nn.Module):
    """The model with its loss inside, as frameworks want it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.inner = workload.module
        self._loss = workload.loss

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns the loss of a micro-batch."""
        return {"loss": self._loss(self.inner(x), (x, labels))}


def forever(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yields batches, epoch after epoch."""
    while True:
        yield from loader


def with_torch(options: argparse.Namespace, workload: Workload) -> list[float]:
    """Trains in plain PyTorch and returns when each step had ended, in s."""
    dist.init_process_group("gloo")
    model = DDP(workload.module, bucket_cap_mb=options.bucket_cap_mb)
    optimizer = workload.optimizer(list(model.parameters()))
    sampler: DistributedSampler[Any] = DistributedSampler(workload.dataset, drop_last=True)
    batches = forever(
        DataLoader(workload.dataset, options.micro_batch, sampler=sampler, drop_last=True)
    )
    ends = [time.perf_counter()]
    for _ in range(options.steps):
        for micro_step in range(options.accumulation):
            x, y = next(batches)
            last = micro_step == options.accumulation - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = workload.loss(model(x), (x, y)) / options.accumulation
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    dist.destroy_process_group()
    return ends


def with_accelerate(options: argparse.Namespace, workload: Workload) -> list[float]:
    """Trains with Accelerate."""
    from accelerate import (  # type: ignore[import-untyped]
        Accelerator,
        DistributedDataParallelKwargs,
    )

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=options.accumulation,
        kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=options.bucket_cap_mb)],
    )
    loader: Any = DataLoader(workload.dataset, options.micro_batch, shuffle=True, drop_last=True)
    optimizer = workload.optimizer(list(workload.module.parameters()))
    model, optimizer, loader = accelerator.prepare(workload.module, optimizer, loader)
    batches = forever(loader)
    for _ in range(options.steps * options.accumulation):
        x, y = next(batches)
        with accelerator.accumulate(model):
            accelerator.backward(workload.loss(model(x), (x, y)))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    return []


def with_trainer(options: argparse.Namespace, workload: Workload) -> list[float]:
    """Trains with the Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        x, y = zip(*samples, strict=True)
        return {"x": torch.stack(x), "labels": torch.stack(y)}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=options.accumulation,
            ddp_bucket_cap_mb=options.bucket_cap_mb,
            ddp_find_unused_parameters=False,
            max_grad_norm=0.0,
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_drop_last=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        )
        model = WithLoss(workload)
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=workload.dataset,
            data_collator=collate,
            optimizers=(workload.optimizer(list(model.parameters())), None),
        )
        trainer.train()
    return []


def with_lightning(options: argparse.Namespace, workload: Workload) -> list[float]:
    """Trains with Lightning."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Model(lightning.LightningModule):
        """The timed model."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = workload.module

        def training_step(self, batch: Any, index: int) -> Tensor:
            """Returns the loss of a micro-batch."""
            return workload.loss(self.inner(batch[0]), batch)

        def configure_optimizers(self) -> Any:
            """Returns the optimizer."""
            return workload.optimizer(list(self.parameters()))

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=DDPStrategy(bucket_cap_mb=options.bucket_cap_mb, process_group_backend="gloo"),
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulation,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(workload.dataset, options.micro_batch, drop_last=True))
    return []


KINDS: dict[str, Callable[[argparse.Namespace, Workload], list[float]]] = {
    "torch": with_torch,
    "accelerate": with_accelerate,
    "trainer": with_trainer,
    "lightning": with_lightning,
}


class Short(Dataset[Any]):
    """So many samples of a dataset: one epoch is the whole training."""

    def __init__(self, whole: Any, length: int) -> None:
        self._whole = whole
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._whole[index % len(self._whole)]


def main() -> None:
    """Trains, and writes when each step of rank 0 had ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=sorted(KINDS), default="torch")
    parser.add_argument("--model", required=True, help="as for the worker's --model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0)
    parser.add_argument("--times", type=Path, help="file for the ends of rank 0's steps, in s")
    parser.add_argument(
        "--leave",
        action="store_true",
        help="end without tearing Python down, which torch's own threads abort at times",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = build(options.model, seed=0, micro_batch=options.micro_batch)
    needed = options.steps * options.accumulation * options.micro_batch * options.ranks
    workload = replace(workload, dataset=Short(workload.dataset, needed))
    ends = KINDS[options.kind](options, workload)
    if options.times is not None and os.environ["RANK"] == "0":
        options.times.write_text(json.dumps(ends))
    if options.leave:
        from benchkit import end_rank

        end_rank()


if __name__ == "__main__":
    main()
