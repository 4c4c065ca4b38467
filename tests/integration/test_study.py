"""The main command end to end: levels, buckets, files, real data, and bad input."""

import json
import re
import socket

import pytest

from tests.integration.conftest import ROOT, run_command
from tests.unit.page_reader import Page

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def four_ranks(study, tmp_path_factory):
    text = tmp_path_factory.mktemp("data") / "text.txt"
    text.write_bytes((ROOT / "pyproject.toml").read_bytes() * 40)
    done = study(
        4,
        *("--model", "gpt-tiny:layers=2,width=64", "--data", text, "--accumulate", "1,4"),
        *("--bucket-cap-mb", "0.1", "--micro-batch", "2", "--steps", "3", "--warmup", "2"),
        # As users start it, from its beginning to its end.
    )
    assert done.code == 0, done.err[-3000:]
    return done


def test_levels_are_every_dp_with_every_accumulation(four_ranks):
    found = [(lv["dp"], lv["accumulation"]) for lv in four_ranks.summary["levels"]]
    assert found == [(dp, k) for dp in (1, 2, 4) for k in (1, 4)]


def test_gradient_collectives_a_step_equal_the_buckets(four_ranks):
    for level in four_ranks.summary["levels"]:
        comm = level["comm"]
        assert comm["num_buckets"] > 1
        assert comm["num_gradient_collectives_per_step"] == comm["num_buckets"]
        assert comm["sources"]["gradient_collectives"] == "process_group"


def test_gradient_bytes_are_the_model(four_ranks):
    info = json.loads((four_ranks.folder / "run.json").read_text())
    for level, facts in zip(four_ranks.summary["levels"], info["facts"], strict=True):
        assert level["comm"]["gradient_bytes"] == facts["parameters"] * 4


def test_observed_batch_is_the_configured_one(four_ranks):
    for level in four_ranks.summary["levels"]:
        check = level["batch_check"]
        expected = 2 * level["accumulation"] * level["dp"]
        assert check["ok"] is True
        assert check["observed"] == check["configured"] == expected


def test_steps_and_warmup_are_optimizer_steps(four_ranks):
    for level in four_ranks.summary["levels"]:
        assert (level["steps"], level["warmup_steps"]) == (3, 2)


def test_output_fits_80_columns_and_has_no_escapes(four_ranks):
    assert "\x1b" not in four_ranks.out
    table = four_ranks.out.split("Run folder")[0].splitlines()
    assert max(len(line) for line in table if "/" not in line[:3]) <= 80
    assert f"\nRun folder: {four_ranks.folder}\n" in four_ranks.out
    report = four_ranks.folder / "report.html"
    assert four_ranks.out.rstrip().endswith(f"Report: {report}")
    page = Page(report.read_text())
    about = "split scaling waterfall ranks timeline allreduce batch overhead settings"
    assert [name for name in about.split() if not page.tables[name]] == []
    # More ranks than a node has cross a network of which this run shows nothing.
    assert page.tables["prediction"] == []
    assert "nothing of the network between nodes" in page.text["prediction"]
    assert "more --ranks-per-node" in page.text["prediction"]


def test_a_run_folder_can_be_compared(four_ranks):
    """With itself: each level is paired with itself, and nothing can be told from one launch."""
    folder = four_ranks.folder
    done = run_command(["-m", "ddp_profiler.cli", "compare", folder, folder, "--json"])
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["comparability"]["differences"] == []
    assert found["comparability"]["obstacles"] == []
    levels = four_ranks.summary["levels"]
    assert [one["level"] for one in found["levels"]] == [level["id"] for level in levels]
    for one, level in zip(found["levels"], levels, strict=True):
        assert one["step"]["verdict"] == "cannot tell"
        assert one["step"]["base_ms"] == one["step"]["new_ms"] == level["step_ms"]["median"]
        low, high = one["step"]["base_ci95_ms"]
        assert low <= one["step"]["base_ms"] <= high
        shown = sum(part["base_ms"] for part in one["parts"])
        assert shown == pytest.approx(level["instrumented_step_ms"]["mean"])
    table = run_command(["-m", "ddp_profiler.cli", "compare", folder, folder]).out
    assert max(map(len, table.splitlines())) <= 80 + len(str(folder))
    assert "The same run is on both sides" in table


def test_files_are_those_of_the_contract(four_ranks):
    names = {path.name for path in four_ranks.folder.iterdir()}
    ranks = {f"rank-{rank:05d}.arrows" for rank in range(4)}
    assert names == {"run.json", "summary.json", "report.html", "plots", *ranks}
    assert (four_ranks.folder / "plots" / "step_parts.png").stat().st_size > 5000


def test_analyze_says_the_same_again_without_torch(four_ranks):
    code = (
        "import sys; from ddp_profiler.cli import main\n"
        f"try: main(['analyze', {str(four_ranks.folder)!r}, '--json'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = run_command(["-c", code])
    assert done.code == 0, done.err
    assert json.loads(done.out) == four_ranks.summary


def test_oversubscribed_cores_are_said(four_ranks):
    cores = json.loads((four_ranks.folder / "run.json").read_text())["environment"]["0"]["cores"]
    assert ("compete for cores" in four_ranks.out) == (cores < 4)


def test_buffers_are_broadcast_in_forward_comm(study):
    done = study(2, "--model", "convnet:width=8", "--steps", "4", "--dp", "2")
    assert done.code == 0, done.err[-3000:]
    level = done.level("dp2")
    assert level["breakdown_ms"]["forward_comm"] > 0
    assert level["comm"]["num_gradient_collectives_per_step"] == level["comm"]["num_buckets"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precisions_run(study, precision):
    done = study(
        1, *("--model", "mlp:width=64", "--precision", precision, "--steps", "2", "--warmup", "2")
    )
    assert done.code == 0, done.err[-3000:]


def test_alone_without_torchrun(tmp_path):
    done = run_command(
        [
            "-m",
            "ddp_profiler.run",
            "--model",
            "mlp:width=64",
            "--steps",
            "2",
            "--out",
            tmp_path / "r",
        ]
    )
    assert done.code == 0, done.err
    assert "without torchrun" in done.err
    assert "dp = 1" in done.err


ENV = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("options", "env", "code", "words"),
    [
        ([], {"RANK": "3", "WORLD_SIZE": "2"}, 2, "RANK=3 and WORLD_SIZE=2"),
        ([], {"RANK": "0"}, 2, "WORLD_SIZE is not set"),
        ([], {"RANK": "x", "WORLD_SIZE": "2"}, 2, "RANK='x'"),
        (["--steps", "0"], ENV, 2, "--steps 0"),
        (["--micro-batch", "0"], ENV, 2, "--micro-batch 0"),
        (["--dp", "1,4"], ENV, 2, "larger than the world of 1 rank"),
        (["--dp", "1,x"], ENV, 2, "'x' is not a whole number"),
        (["--model", "gtp-tiny"], ENV, 2, "gpt-tiny"),
        (["--model", "no.such:factory"], ENV, 3, "no.such"),
        (["--model", "json:dumpling"], ENV, 3, "dumpling"),
        (["--data", "/no/such/file"], ENV, 3, "/no/such/file"),
        (["--data", "/dev/null"], ENV, 3, "/dev/null"),
        (["--backend", "nccl"], ENV, 2, "nccl"),
        (["--precision", "fp8"], ENV, 2, "--precision fp8"),
        (["--bogus"], ENV, 2, "--bogus"),
        (["--plant", "part=nowhere,ms=1"], ENV, 2, "nowhere"),
    ],
)
def test_bad_input_is_one_or_two_clear_lines(tmp_path, options, env, code, words):
    folder = tmp_path / "run"
    done = run_command(["-m", "ddp_profiler.run", "--out", folder, *options], env=env)
    lines = done.err.strip().splitlines()
    assert done.code == code, done.err
    assert words in done.err
    assert 1 <= len(lines) <= 2, done.err
    assert not (folder / "run.json").exists()


def test_dtype_that_the_backend_cannot_reduce(study, tmp_path):
    (tmp_path / "odd.py").write_text(
        "import torch\nfrom ddp_profiler.workload import Workload, WorkloadSettings\n"
        "class M(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.ones(4).to(torch.float8_e5m2))\n"
        "    def forward(self, x):\n        return x.sum() + self.w.float().sum()\n"
        "def make(settings):\n"
        "    return Workload(name='odd', module=M(),\n"
        "        dataset=torch.utils.data.TensorDataset(torch.ones(64, 2)),\n"
        "        inputs=lambda b: (b[0],), loss=lambda o, b: o,\n"
        "        optimizer=lambda p: torch.optim.SGD(p, lr=0.1))\n"
    )
    done = study(2, "--model", "odd:make", cwd=tmp_path)
    ours = [line for line in done.err.splitlines() if line.startswith("ddp_profiler.run: ")]
    assert done.code != 0
    assert len(ours) == 1, done.err
    assert "failed in checking what the backend can reduce" in ours[0]
    assert ours[0].endswith("The gloo backend cannot sum gradients of type float8_e5m2.")
    assert "Use a model with float32 parameters" in done.err
    assert not done.folder.exists()


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(four_ranks):
    before = (four_ranks.folder / "summary.json").read_bytes()
    done = run_command(["-m", "ddp_profiler.run", "--out", four_ranks.folder])
    assert done.code == 2
    assert "already holds a run" in done.err
    assert (four_ranks.folder / "summary.json").read_bytes() == before


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = run_command(
            ["-m", "ddp_profiler.run", "--model", "mlp:width=64", "--out", tmp_path / "run"],
            env=env,
        )
    assert done.code == 2, done.err
    assert f"Port {port} is in use" in done.err
    assert not (tmp_path / "run").exists()


def test_an_exception_in_the_model_is_named_with_rank_and_place(tmp_path):
    (tmp_path / "broken.py").write_text(
        "import torch\nfrom ddp_profiler.workload import Workload\n"
        "class M(torch.nn.Linear):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        M.calls += 1\n"
        "        if M.calls > 9: raise ValueError('planted')\n"
        "        return super().forward(x)\n"
        "def make(settings):\n"
        "    return Workload(name='broken', module=M(2, 1),\n"
        "        dataset=torch.utils.data.TensorDataset(torch.ones(64, 2)),\n"
        "        inputs=lambda b: (b[0],), loss=lambda o, b: o.mean(),\n"
        "        optimizer=lambda p: torch.optim.SGD(p, lr=0.1))\n"
    )
    done = run_command(
        ["-m", "ddp_profiler.run", "--model", "broken:make", "--out", tmp_path / "run"],
        cwd=tmp_path,
    )
    assert done.code == 3
    assert f"rank 0 on {socket.gethostname()} failed in level dp1, plain block" in done.err
    assert re.search(r"ValueError: planted \(.*broken\.py:7\)", done.err)
    assert "Traceback" not in done.err
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["status"] == "failed"
    shown = run_command(["-m", "ddp_profiler.cli", "analyze", tmp_path / "run"])
    assert shown.code == 0, shown.err
    assert "PARTIAL" in shown.out


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda folder: None, 3, "holds no run"),
        (lambda folder: (folder / "run.json").write_text(""), 3, "empty"),
        (lambda folder: (folder / "run.json").write_text("{"), 3, "cannot be read"),
        (
            lambda folder: (folder / "run.json").write_text('{"schema_version": 99}'),
            3,
            "schema version 99",
        ),
    ],
)
def test_analyze_of_something_else(tmp_path, make, code, words):
    make(tmp_path)
    done = run_command(["-m", "ddp_profiler.cli", "analyze", tmp_path])
    assert done.code == code
    assert words in done.err
    assert len(done.err.strip().splitlines()) <= 2


def test_help_teaches():
    done = run_command(["-m", "ddp_profiler.run", "--help"])
    assert done.code == 0
    for word in ("--dp", "--accumulate", "gpt-small", "torchrun --nproc_per_node", "Exit codes"):
        assert word in done.out
