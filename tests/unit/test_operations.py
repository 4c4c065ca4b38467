"""Operations and their bytes, against counts made by hand."""

import pytest
import torch
from torch import nn

from ddp_profiler.measure import flops, operations, peaks
from ddp_profiler.measure.operations import ByteCounter, count_operations
from ddp_profiler.schema import CopyRate
from ddp_profiler.workload import build

CPU = torch.device("cpu")
N = 1000
X = 4 * N  # Bytes of a tensor of N fp32.


def counted(run):
    with ByteCounter() as counter:
        run()
    groups = counter.groups()
    return (
        sum(group.operations for group in groups),
        sum(group.nbytes for group in groups),
        sum(group.flops for group in groups),
    )


def fresh(*shape):
    return torch.ones(shape or (N,))


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: x + fresh_y, (1, 3 * X, 0)),
        (lambda x: x * x, (1, 2 * X, 0)),
        (lambda x: x.mul_(2.0), (1, 2 * X, 0)),
        (lambda x: x.add_(fresh_y), (1, 3 * X, 0)),
        (lambda x: x.copy_(fresh_y), (1, 2 * X, 0)),
        (lambda x: x.zero_(), (1, X, 0)),
        (lambda x: torch.zeros_like(x), (1, X, 0)),
        (lambda x: torch.mul(x, fresh_y, out=fresh_z), (1, 3 * X, 0)),
        (lambda x: x.sum(), (1, X + 4, 0)),
        (lambda x: x.view(10, 100).t()[2:4].detach(), (0, 0, 0)),
        (lambda x: torch.empty_like(x), (0, 0, 0)),
        (lambda x: torch._foreach_add_([x, fresh_y], [fresh_z, fresh_y]), (1, 5 * X, 0)),
        # An expanded tensor is as large as what is there.
        (lambda x: x[:1].expand(N).clone(), (1, X + X, 0)),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_bytes_of_an_operation(run, expected):
    x = fresh()
    assert counted(lambda: run(x)) == expected


fresh_y, fresh_z = fresh(), fresh()


def test_a_product_has_flops_and_an_embedding_reads_what_it_returns():
    a, b = fresh(20, 30), fresh(30, 40)
    nbytes = 4 * (20 * 30 + 30 * 40 + 20 * 40)
    assert counted(lambda: a @ b) == (1, nbytes, 2 * 20 * 30 * 40)
    table, index = fresh(5000, 16), torch.tensor([3, 4999])
    rows = 4 * 2 * 16
    assert counted(lambda: nn.functional.embedding(index, table)) == (1, 16 + 2 * rows, 0)


def test_backward_counts_too():
    x = fresh().requires_grad_()
    forward = counted(lambda: x.exp())
    both = counted(lambda: torch.autograd.grad(x.exp().sum(), x))
    # Sum, a one for its gradient, and exp's own backward at the least.
    assert both[1] > forward[1] + 3 * X


def test_a_micro_step_and_its_optimizer():
    workload = build("mlp:width=32,depth=2,inputs=16,classes=4", seed=0, micro_batch=8)
    result = count_operations(workload, CPU, 8)
    assert sum(g.flops for g in result.micro_step) == 8 * flops.count_flops(workload, CPU)
    nbytes = 4 * sum(p.numel() for p in workload.module.parameters())
    # At least the parameters and gradients are read and the parameters written.
    assert sum(g.nbytes for g in result.optimizer) >= 3 * nbytes
    assert all(g.flops == 0 for g in result.optimizer)


def test_bytes_grow_with_the_micro_batch_and_shrink_with_the_precision():
    workload = build("mlp:width=64,depth=2,inputs=64,classes=4", seed=0, micro_batch=8)

    def nbytes(micro_batch, dtype=None):
        groups = count_operations(workload, CPU, micro_batch, dtype).micro_step
        return sum(g.nbytes for g in groups if g.flops)

    assert nbytes(256) > 4 * nbytes(8)
    assert nbytes(256, torch.bfloat16) == nbytes(256) // 2


def test_counting_leaves_the_model_as_it_was():
    workload = build("convnet:width=4", seed=0, micro_batch=8)
    before = {name: value.clone() for name, value in workload.module.state_dict().items()}
    random = torch.get_rng_state()
    assert count_operations(workload, CPU, 4) is not None
    after = workload.module.state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert all(p.grad is None for p in workload.module.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_without_room_the_optimizer_is_not_counted(monkeypatch):
    workload = build("mlp:width=32,depth=1", seed=0, micro_batch=8)
    monkeypatch.setattr(operations, "_free_memory", lambda device: 1000)
    result = count_operations(workload, CPU, 2)
    assert result.optimizer is None
    assert result.micro_step


def test_copies_count_both_ways(monkeypatch):
    times = {64 * 2**10: 1e-6, 256 * 2**10: 8e-6}

    def best_time(device, run, at_once, seconds):
        target = run.__defaults__[1]
        assert len(run.__defaults__[0]) == len(target)
        return times[2 * target.nbytes]

    monkeypatch.setattr(peaks, "_best_time", best_time)
    assert peaks.measure_copies(CPU, largest=2**18) == (
        CopyRate(2**16, 2**16 / 1e-6),
        CopyRate(2**18, 2**18 / 8e-6),
    )


def test_peaks_of_this_machine():
    found = peaks.measure_peaks(CPU, torch.float32, rank=3)
    assert (found.rank, found.device_type, found.arithmetic) == (3, "cpu", "fp32")
    assert found.name
    assert found.flops_per_s > 0
    assert [copy.nbytes for copy in found.copies] == [2**16 * 4**i for i in range(7)]
    assert all(copy.bytes_per_s > 0 for copy in found.copies)
    assert 0 < found.operation_s < 0.01


def test_arithmetic_follows_the_settings():
    assert peaks.arithmetic(CPU, torch.bfloat16) == "bf16"
    gpu = torch.device("cuda")
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert peaks.arithmetic(gpu, torch.float32) == "tf32"
        assert peaks.arithmetic(CPU, torch.float32) == "fp32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert peaks.arithmetic(gpu, torch.float32) == "fp32"
