"""What a workload must be, and how it says what is wrong with it."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.workload import Workload, WorkloadSettings


def workload(**changes):
    return Workload(
        **{
            "name": "mine",
            "module": nn.Linear(2, 1),
            "dataset": TensorDataset(torch.zeros(4, 2)),
            "inputs": lambda batch: (batch[0],),
            "loss": lambda output, batch: output.mean(),
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            **changes,
        }
    )


def frozen_linear():
    return nn.Linear(2, 1).requires_grad_(False)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index


class Unsized(Dataset):
    def __getitem__(self, index):
        return index


def test_defaults():
    made = workload()
    assert made.tokens_per_sample is None
    assert made.options == {}
    assert made.extra_modules == ()
    assert made.find_unused_parameters is False
    with pytest.raises(AttributeError):
        made.name = "other"


def test_accepts_what_others_hand_in():
    encoder = nn.Linear(2, 2)
    workload(
        dataset=[1, 2, 3],  # Not torch's Dataset, yet map-style.
        optimizer=torch.optim.AdamW,
        extra_modules=(encoder, frozen_linear()),
        options={"a": 1, "b": 0.5, "c": "x"},
        tokens_per_sample=7,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "Workload: name is ''."),
        ({"name": 3}, "Workload: name is 3."),
        (
            {"module": len},
            "Workload 'mine': module is builtin_function_or_method, not a torch.nn.Module.",
        ),
        ({"module": nn.Linear}, "Workload 'mine': module is Linear, not a torch.nn.Module."),
        ({"module": nn.ReLU()}, "Workload 'mine': module has no trainable parameters."),
        ({"module": frozen_linear()}, "Workload 'mine': module has no trainable parameters."),
        ({"dataset": None}, "Workload 'mine': dataset is NoneType, not map-style."),
        ({"dataset": Endless()}, "Workload 'mine': dataset is Endless, not map-style."),
        (
            {"dataset": Unsized()},
            "Workload 'mine': dataset is Unsized, whose length cannot be told "
            "(TypeError: object of type 'Unsized' has no len()).",
        ),
        ({"dataset": []}, "Workload 'mine': dataset is empty."),
        ({"inputs": None}, "Workload 'mine': inputs is NoneType, not a function."),
        ({"loss": "mse"}, "Workload 'mine': loss is str, not a function."),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)},
            "Workload 'mine': optimizer is SGD, not a function.",
        ),
        ({"tokens_per_sample": 0}, "Workload 'mine': tokens_per_sample is 0."),
        ({"tokens_per_sample": True}, "Workload 'mine': tokens_per_sample is True."),
        ({"options": [1]}, "Workload 'mine': options is [1]."),
        ({"options": {"a": None}}, "Workload 'mine': options is {'a': None}."),
        (
            {"extra_modules": nn.Linear(1, 1)},
            "Workload 'mine': extra_modules is not a tuple of torch.nn.Module.",
        ),
        ({"find_unused_parameters": 1}, "Workload 'mine': find_unused_parameters is 1."),
    ],
)
def test_refused(changes, message):
    with pytest.raises(InputError) as caught:
        workload(**changes)
    assert caught.value.message == message
    assert caught.value.remedy
    assert "\n" not in caught.value.message + caught.value.remedy


def test_refuses_a_parameter_in_both_module_and_extra_modules():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with pytest.raises(InputError, match="extra_modules and module share parameters"):
        workload(module=module, extra_modules=(module[0],))


@pytest.mark.usefixtures("process_group")
def test_refuses_a_wrapped_module():
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    with pytest.raises(InputError, match="already wrapped in DistributedDataParallel"):
        workload(module=wrapped)


def test_settings():
    assert WorkloadSettings(seed=1, micro_batch=2).options == {}
    with pytest.raises(UsageError, match="micro_batch 0 is below 1"):
        WorkloadSettings(seed=1, micro_batch=0)
