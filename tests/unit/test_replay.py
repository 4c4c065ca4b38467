"""The function that --replay names, what is kept of a step, and what loss and backward show."""

import re
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from ddp_profiler.analysis.gradient_scale import scale_notes
from ddp_profiler.errors import UsageError
from ddp_profiler.measure.gradients import compare_gradients
from ddp_profiler.measure.isolation import fp32_rounding
from ddp_profiler.measure.scripts.kept_step import KeptStep, copy_to_host
from ddp_profiler.measure.scripts.loss_divisor import loss_divisor
from ddp_profiler.measure.scripts.replay import Replay, load_oracle
from ddp_profiler.schema import BatchProof, LevelFacts, LevelSettings, Variant
from tests.unit.test_attachment import Observed
from tests.unit.test_summary import run_info

LOSS = torch.ones(3, requires_grad=True).square().mean()
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """A script's folder with a module that nobody else has."""
    (tmp_path / "replay_oracle.py").write_text(
        "import torch\nprint('imported', torch.rand(1))\nnumber = 3\n"
        "def loss(module, batches):\n    return None\ndef one(module):\n    return None\n"
    )
    (tmp_path / "replay_broken.py").write_text("raise ValueError('planted')\n")
    yield tmp_path
    for name in ("replay_oracle", "replay_broken"):
        sys.modules.pop(name, None)


def test_the_function_is_imported_from_the_scripts_folder(folder, capsys):
    state, paths = torch.get_rng_state(), list(sys.path)
    oracle = load_oracle("replay_oracle:loss", folder)
    assert oracle is sys.modules["replay_oracle"].loss
    assert torch.equal(torch.get_rng_state(), state)
    assert sys.path == paths
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("imported ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("replay_missing:loss", "--replay replay_missing:loss: No module named 'replay_missing'"),
        ("replay_broken:loss", "importing replay_broken raised ValueError: planted"),
        ("replay_oracle:los", "has no los; did you mean loss?"),
        ("replay_oracle:number", "--replay replay_oracle:number is int, not a function"),
        ("replay_oracle:one", "--replay replay_oracle:one cannot be called with 2 arguments"),
    ],
)
def test_a_wrong_name_is_wrong_usage(folder, name, message):
    with pytest.raises(UsageError) as caught:
        load_oracle(name, folder)
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.remedy
    assert str(folder) not in sys.path


@pytest.mark.parametrize(
    ("root", "divisor"),
    [
        (LOSS / 4, 4),
        (LOSS.div(3.0), 3),
        (LOSS * 0.5, 2),
        (0.25 * LOSS, 4),
        (torch.tensor(0.25) * LOSS, 4),
        (LOSS / torch.tensor(5), 5),
        ((LOSS / 2) * 4, 0.5),
        (LOSS / 2 / 2, 4),
        (LOSS, None),
        (LOSS * LOSS, None),
        (LOSS + 1, None),
        (-LOSS / 2, 2),
        (1 / LOSS, 1),
        (LOSS * 0, None),
        (torch.ones(1), None),
    ],
)
def test_what_a_loss_was_divided_by(root, divisor):
    assert loss_divisor(root) == divisor


def test_the_scale_of_a_scaler_is_no_divisor():
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    assert loss_divisor(scaler.scale(LOSS / 2), scaled=True) == 2
    assert loss_divisor(scaler.scale(LOSS * 0.5), scaled=True) == 2
    assert loss_divisor(scaler.scale(LOSS), scaled=True) is None


@pytest.mark.parametrize("scales", [False, True])
def test_the_divisor_of_a_script_is_seen(process_group, scales):
    seen = Observed(plan=[(Variant.WARMUP, 9)])
    seen.attachment.install()
    try:
        ddp = DDP(nn.Linear(3, 2))
        sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scales)
        for _ in range(2):
            for _ in range(3):
                scaler.scale(ddp(torch.ones(6, 3)).sum() / 3).backward()
            scaler.step(sgd)
            scaler.update()
    finally:
        seen.finish()
    assert seen.attachment.loss_divisor == 3


def facts(**changes):
    return LevelFacts("script", 500, 2000, 1, None, {}, **changes)


def notes(accumulation=1, settings=None, **changes):
    level = LevelSettings("script", 2, 4, accumulation, "packed", (0, 1))
    info = run_info(settings=settings or {"script": "train.py"})
    return scale_notes(info, level, facts(**changes))


def test_what_is_said_without_a_replay():
    (cannot_tell,) = notes()
    assert cannot_tell.startswith(
        "The gradient's scale cannot be told from the run alone; --replay"
    )
    assert notes(2, loss_divisor=2.0) == (
        cannot_tell,
        "The loss is divided by 2 before backward; accumulation is 2.",
    )
    assert notes(4) == (
        cannot_tell,
        "Autograd shows no division of the loss just before backward; accumulation is 4.",
    )
    # In a study the batch proof tells it.
    assert notes(settings={"model": "mlp"}) == ()


def test_what_is_said_of_a_replay_that_is_still_to_come():
    asked = {"script": "train.py", "replay": "oracle:loss"}
    assert notes(settings=asked, loss_divisor=2.0) == (
        "The gradient's scale is compared (replay) when training has ended.",
    )
    assert notes(settings=asked, proof=BatchProof(None, 0.0, None, 1.0, None)) == ()


def test_copies_share_ties_but_no_values():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.two.weight = self.one.weight
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.register_buffer("count", torch.ones(1))
            self.own_forward = self.forward

        def forward(self, x):
            return self.two(self.one(x))

    module = Tied()
    copied = copy_to_host(module)
    assert copied.two.weight is copied.one.weight
    assert not copied.frozen.weight.requires_grad
    assert copied.own_forward.__self__ is copied
    with torch.no_grad():
        module.one.weight.zero_()
        module.count.zero_()
    assert bool(copied.one.weight.all())
    assert bool(copied.count.all())


def test_a_batch_is_kept_as_the_loader_gave_it(process_group, tmp_path):
    """What the loop does to it afterwards, and what it does to the weights, changes nothing."""
    kept = KeptStep(1, leads=True)
    replay = Replay("oracle:loss", lambda module, batches: module(batches[0]["x"]).mean(), kept)
    path = tmp_path / "batches.pt"
    file_there = []

    def block(_):
        if seen.attachment.started and seen.attachment.tracker.step > 1:
            assert replay.share(path) in ("", None)
            file_there.append(path.is_file())

    seen = Observed(plan=[(Variant.WARMUP, 2), (Variant.WARMUP, 1)])
    seen.attachment._kept = kept
    seen.attachment._on_block = block
    seen.attachment.install()
    try:
        torch.manual_seed(0)
        ddp = DDP(nn.Linear(3, 2))
        sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
        data = [{"x": torch.full((3,), float(i)), "labels": i} for i in range(8)]
        for batch in DataLoader(data, batch_size=2):
            batch.pop("labels")
            ddp(batch["x"]).mean().backward()
            sgd.step()
            sgd.zero_grad()
            batch["x"].zero_()
    finally:
        seen.finish()
    assert file_there[0]
    assert torch.load(path)["micro_batches"][0]["labels"].tolist() == [2, 3]
    live = weakref.ref(ddp.module)
    seen.attachment.let_go()
    del ddp, sgd
    # Nothing of what is kept holds the script's own model.
    assert live() is None
    proof = replay.prove(1, lambda _: path, lambda _: "")
    assert proof.factor == pytest.approx(1, abs=1e-6)
    assert proof.max_rel_error < 1e-6
    assert seen.failures == []


def test_a_step_that_was_never_reached():
    kept = KeptStep(3, leads=True)
    replay = Replay("oracle:loss", lambda *_: None, kept)
    proof = replay.prove(1, lambda _: None, lambda _: "")
    assert proof.notes == (
        "Not compared with one process: the script ended before step 3 was over.",
    )


def test_the_documented_example():
    text = (Path(__file__).resolve().parents[2] / "docs" / "scripts.md").read_text()
    (example,) = re.findall(r"```python\n(# oracle.py.*?)```", text, re.DOTALL)
    names = {}
    exec(example, names)
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    loss = names["loss"](model, [(x[:2], y[:2]), (x[2:], y[2:])])
    assert torch.equal(loss, nn.functional.cross_entropy(model(x), y))


def test_factors_within_the_rounding_of_the_way_are_1():
    level = LevelSettings("x", 2, 4, 1, "packed", (0, 1))
    one = {"a": torch.tensor([1.0, 2.0])}
    near, far = {"a": one["a"] * 1.004}, {"a": one["a"] * 2.004}
    assert compare_gradients(near, one, level).factor == pytest.approx(1.004)
    eps = torch.finfo(torch.bfloat16).eps
    assert compare_gradients(near, one, level, rounding=eps).factor == 1.0
    assert compare_gradients(far, one, level, rounding=eps).factor_name == "dp"
    assert compare_gradients(far, one, level).factor_name is None


def test_rounding_of_fp32_follows_the_settings():
    before = torch.backends.mkldnn.matmul.fp32_precision
    assert fp32_rounding(CPU) == torch.finfo(torch.float32).eps
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        assert fp32_rounding(CPU) == 2.0**-7
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert fp32_rounding(torch.device("cuda")) == 2.0**-10
