"""The example in docs/custom-models.md works as it stands."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from ddp_profiler.workload import Workload, WorkloadSettings, build

DOCS = Path(__file__).parents[2] / "docs" / "custom-models.md"


@pytest.fixture
def text():
    return DOCS.read_text(encoding="utf-8")


def test_example(text, tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "my_model.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = re.search(r"--model (my_model:\S+)", text).group(1)
    try:
        workload = build(spec, seed=0, micro_batch=4, data=None)
    finally:
        sys.modules.pop("my_model", None)
    assert workload.options == {"width": 128}
    batch = default_collate([workload.dataset[i] for i in range(4)])
    optimizer = workload.optimizer(workload.module.parameters())
    losses = []
    for _ in range(5):
        loss = workload.loss(workload.module(*workload.inputs(batch)), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("described", [Workload, WorkloadSettings])
def test_every_field_is_described(text, described):
    for field in described.__dataclass_fields__:
        assert f"| `{field}` |" in text
