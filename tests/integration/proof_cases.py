"""Proves the batch of many small levels in one launch; prints a JSON line per case and rank.

Run by test_proof.py: torchrun --nproc_per_node=N proof_cases.py
"""

import dataclasses
import hashlib
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

from ddp_profiler.measure import isolation, proof
from ddp_profiler.measure.batches import Batches
from ddp_profiler.measure.gradients import checksum
from ddp_profiler.measure.leave import leave
from ddp_profiler.schema import LevelSettings
from ddp_profiler.workload import Workload, build

CPU = torch.device("cpu")
SMALL = "gpt-tiny:layers=2,width=32,heads=2,context=16"


def custom(module, *, reduction="mean", inputs=lambda batch: (batch[0],), find_unused=False):
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, 512, 16, generator=generator)
    return Workload(
        name="custom",
        module=module,
        dataset=TensorDataset(x, y),
        inputs=inputs,
        # Per sample the mean over features, then mean or sum over samples.
        loss=lambda out, batch: getattr(
            mse_loss(out, batch[1], reduction="none").mean(1), reduction
        )(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        find_unused_parameters=find_unused,
    )


def linear(*extra):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), *extra, nn.Linear(24, 16))


class Picky(nn.Module):
    """Raises where more samples come than one micro-batch has."""

    def __init__(self, error):
        super().__init__()
        self.net = linear()
        self.error = error

    def forward(self, x):
        if len(x) > 4:
            raise self.error
        return self.net(x)


class Talkative(nn.Module):
    """Reduces something in forward, as some losses do."""

    def __init__(self):
        super().__init__()
        self.net = linear()

    def forward(self, x):
        mean = x.detach().mean().clone()
        dist.all_reduce(mean)
        return self.net(x) + 0 * mean


class KeyBias(nn.Module):
    """Attention, whose key bias has a gradient of rounding only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.query, self.key, self.value = (nn.Linear(1, 8) for _ in range(3))
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        x = x.unsqueeze(-1)
        y = scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.out(y).squeeze(-1)


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = linear()
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.net(x)


class Unpicklable(list):
    def __reduce_ex__(self, protocol):
        raise TypeError("no")


def digest(*modules):
    found = hashlib.sha256()
    for module in modules:
        for name, value in sorted(module.state_dict().items()):
            found.update(name.encode())
            found.update(str(checksum(value)).encode())
        found.update(str([m.training for m in module.modules()]).encode())
    found.update(torch.get_rng_state().numpy().tobytes())
    return found.hexdigest()


def flip_a_bit(rank):
    """Makes one bit of a reduced gradient differ on one rank."""
    step = proof._step

    def flipping(ddp, *arguments):
        samples = step(ddp, *arguments)
        if dist.get_rank() == rank:
            gradient = list(ddp.module.parameters())[2].grad
            gradient.view(torch.int32)[-1] ^= 1
        return samples

    return flipping


class Cases:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        members = {tuple(range(n)) for n in (1, self.world)} | {(self.world - 1,)}
        if self.world > 2:
            members.add(tuple(range(1, self.world)))
        self.groups = {ranks: dist.new_group(list(ranks)) for ranks in sorted(members)}

    def run(
        self,
        name,
        model,
        *,
        ranks=None,
        accumulation=1,
        micro_batch=4,
        factor=1.0,
        change_batch=lambda batch: batch,
        **options,
    ):
        """Proves one level and reports it. ``factor`` is a fault in the loop's loss."""
        ranks = tuple(range(self.world)) if ranks is None else ranks
        if self.rank in ranks:
            level = LevelSettings(name, len(ranks), micro_batch, accumulation, "packed", ranks)
            if isinstance(model, str):
                model = build(model, seed=0, micro_batch=micro_batch)
            group, place = self.groups[ranks], ranks.index(self.rank)
            batches = Batches(model, level, place, 0, CPU)
            batches.next, following = lambda: change_batch(following()), batches.next
            ddp = DDP(
                model.module,
                process_group=group,
                bucket_cap_mb=0.05,
                find_unused_parameters=model.find_unused_parameters,
            )
            torch.manual_seed(5 + self.rank)
            before = digest(model.module, *model.extra_modules)
            result = proof.prove_batch(
                ddp,
                model,
                batches,
                level,
                group,
                CPU,
                scale_loss=lambda loss: loss / accumulation * factor,
                **options,
            )
            after = digest(model.module, *model.extra_modules)
            modules = (model.module, *model.extra_modules)
            left = [p for m in modules for p in m.parameters() if p.grad is not None]
            row = {
                "case": name,
                "rank": self.rank,
                "restored": before == after and not left,
                "backends": [s.fp32_precision for s in isolation._PRECISIONS],
                **dataclasses.asdict(result),
            }
            # One write: lines of several ranks must not mix.
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
        dist.barrier()

    def all(self):
        everyone = tuple(range(self.world))
        for model in ("gpt-tiny", "mlp"):
            for ranks in ((0,), everyone) if self.world == 2 else (everyone,):
                for accumulation in (1, 2, 4):
                    name = f"{model} dp {len(ranks)} accumulation {accumulation}"
                    self.run(name, model, ranks=ranks, accumulation=accumulation)
        dp = self.world
        self.run("times dp", SMALL, accumulation=4, micro_batch=5, factor=dp)
        self.run("times accumulation", SMALL, accumulation=4, micro_batch=5, factor=4)
        self.run("times both", SMALL, accumulation=4, micro_batch=5, factor=4 * dp)
        self.run("equal settings", SMALL, accumulation=dp, micro_batch=5, factor=dp)
        self.run("over accumulation", SMALL, accumulation=4, micro_batch=5, factor=1 / 4)
        self.run("times 7", SMALL, accumulation=4, factor=7)
        self.run("sum", custom(linear(), reduction="sum"), accumulation=4, micro_batch=5)
        self.run("bfloat16 times dp", SMALL + ",dtype=bfloat16", factor=dp)
        self.run("last ranks", SMALL, ranks=everyone[1:], accumulation=2)
        self.run("timed", "timed:layers=2,forward_ms=1,backward_ms=1", accumulation=2)
        encoder = "timed:layers=2,forward_ms=1,backward_ms=1,outside_backward_ms=1"
        self.run("encoder", encoder, accumulation=2)
        self.run("batch norm", "convnet:width=4", accumulation=2)
        self.run("batch norm alone", "convnet:width=4", ranks=(0,))
        self.run("dropout", SMALL + ",dropout=0.2")
        self.run("dropout alone", SMALL + ",dropout=0.2", ranks=(0,))
        self.run("key bias", custom(KeyBias()), accumulation=2)
        self.run("unused", custom(Spare(), find_unused=True))
        rows = {"change_batch": lambda batch: [batch[0].float(), batch[1].float()]}
        self.run("list", custom(linear()), **rows)

        step, proof._step = proof._step, flip_a_bit(self.world - 1)
        self.run("one bit", SMALL, accumulation=2)
        proof._step = step

        slow = 100.0 if self.rank == self.world - 1 else 0.001
        self.run("slow", SMALL, accumulation=2, time_per_micro_step_s=slow)
        self.run("quick", SMALL, accumulation=2, time_per_micro_step_s=0.001)
        self.run("error", custom(Picky(KeyError("sorry"))))
        memory = torch.OutOfMemoryError("CUDA out of memory.")
        self.run("out of memory", custom(Picky(memory)), accumulation=2)
        self.run("out of memory times dp", custom(Picky(memory)), accumulation=4, factor=dp)
        self.run("collective", custom(Talkative()))
        self.run("unpicklable", custom(linear()), change_batch=Unpicklable)
        uneven = {"change_batch": lambda b: [v[: 4 - self.rank % 2] for v in b]}
        self.run("uneven", custom(linear()), **uneven)

    def synchronised_batch_norm(self):
        """Alone, it computes as plain batch norm does; else it refuses the CPU."""
        synchronised, plain = nn.SyncBatchNorm(4), nn.BatchNorm1d(4)
        x = torch.randn(8, 4)
        with isolation.alone([nn.Sequential(synchronised)]):
            equal = torch.equal(synchronised(x), plain(x))
        try:
            synchronised(x)
            refused = False
        except ValueError:
            refused = True
        sys.stdout.write(json.dumps({"case": "sync", "equal": equal, "refused": refused}) + "\n")
        sys.stdout.flush()

    def trains_on(self):
        """Training is bit for bit the same with a proof in between."""
        weights = []
        for with_proof in (False, True):
            model = custom(linear(nn.BatchNorm1d(24), nn.Dropout(0.1)), find_unused=True)
            ddp = DDP(model.module, bucket_cap_mb=0.001, find_unused_parameters=True)
            optimizer = model.optimizer(ddp.parameters())
            level = LevelSettings("x", self.world, 4, 2, "packed", tuple(range(self.world)))
            batches = Batches(model, level, self.rank, 0, CPU)
            torch.manual_seed(9)
            for step in range(4):
                if with_proof and step == 2:
                    group = self.groups[level.ranks]
                    proof.prove_batch(
                        *(ddp, model, batches, level, group, CPU), scale_loss=lambda loss: loss
                    )
                x = torch.randn(4, 16)
                ddp(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append(digest(model.module))
        sys.stdout.write(json.dumps({"case": "trains on", "same": len(set(weights)) == 1}) + "\n")
        sys.stdout.flush()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases = Cases()
    cases.all()
    cases.synchronised_batch_norm()
    cases.trains_on()
    dist.barrier()
    dist.destroy_process_group()
    leave(0)  # Torch's own threads could abort the interpreter's end.


if __name__ == "__main__":
    main()
