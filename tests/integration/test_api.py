"""Programs that observe themselves: every case of training, ranks without a launcher, windows."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from ddp_profiler.record import reader
from ddp_profiler.schema import SpanKind, Variant
from tests.integration.conftest import Looks, run_command, timed, torchrun, unaborted
from tests.integration.scripts import train
from tests.integration.test_scripts import SCRIPTS, check_spans

pytestmark = pytest.mark.distributed

MLP = 4 * (16 * 32 + 32 + 32 * 4 + 4)
OF_CASE = {
    "buffers": {"bytes": MLP + 4 * 2 * 32},
    "unused": {"bytes": 4 * 2 * (16 * 4 + 4)},
    "hook": {"source": "user_hook"},
    "powersgd": {"source": "user_hook"},
    "two_models": {"bytes": MLP + 4 * (4 * 4 + 4), "collectives": 2, "buckets": 2},
    # A weight that is used twice counts once, frozen ones not at all.
    "tied": {"bytes": 4 * (16 * 16 + 2 * 16 + 16 * 4 + 4)},
    "accumulation": {"accumulation": 2},
    "always_synced": {"accumulation": 2, "bytes": 2 * MLP, "collectives": 2},
    "closure": {"accumulation": 2, "bytes": 2 * MLP, "collectives": 2},
    # Such a hook was registered when nobody was there to wrap it.
    "hook-before": {"source": None, "bytes": None, "collectives": None},
    "hook-every": {"source": "user_hook"},
    "accumulation-every": {"accumulation": 2},
}
BEFORE = ["plain-before", "hook-before", "compiled_ddp-before"]
EVERY = ["plain-every", "hook-every", "accumulation-every"]
CASES = [*train.CASES, *BEFORE, *EVERY]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each case ended with on each rank, without and inside a block; by ranks and case."""
    known = {}

    def of(ranks):
        if ranks not in known:
            folder = tmp_path_factory.mktemp("cases")
            done = torchrun(ranks, SCRIPTS / "all_cases.py", folder)
            rows = [json.loads(line) for line in done.out.splitlines()]
            known[ranks] = {row.get("case", "early"): row for row in rows}
            assert done.code == 0, done.err
            assert list(known[ranks]) == ["early", *CASES], done.err
            assert "has failed" not in done.err, done.err
        return known[ranks]

    return of


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_training_stays_what_it_was(trained, ranks, case):
    row = trained(ranks)[case]
    assert len(row["ends"]) == ranks
    for plain, observed in row["ends"]:
        assert observed == plain
    digests = {end[0] for end in row["ends"][0]}
    assert len(digests) == 1
    expected = {"bytes": MLP, "collectives": 1, "buckets": 1, "source": "process_group"}
    expected |= {"accumulation": 1, **OF_CASE.get(case, {})}
    accumulation = expected.pop("accumulation")
    assert {name: row[name] for name in expected} == expected
    assert row["batch"] == [4, accumulation, ranks]
    assert row["observed"] == 4 * accumulation * ranks
    # Every act of both models is seen, and one backward follows.
    of_others = ("The gradient's scale", "The loss is", "Autograd shows", "An epoch")
    assert [note for note in row["notes"] if not note.startswith(of_others)] == (
        ["2 forward calls a step and rank, not 1."] if case == "two_models" else []
    )
    assert row["parts"] == pytest.approx(0, abs=1e-9)
    # In two windows, of 12 steps; nothing was attached in between.
    assert row["windows"] == ([[2, 5], [7, 10]] if case in EVERY else [])
    # In the join of uneven inputs ranks reduce a flag in forward.
    assert (row["forward_comm"] > 0) == (case in ("buffers", "uneven"))


def test_cases_are_trainings_of_their_own(trained):
    ends = {case: trained(2)[case]["ends"][0][0][0] for case in CASES}
    assert ends["plain"] == ends["plain-before"] == ends["compiled_ddp"]
    assert ends["plain"] == ends["plain-every"]
    assert ends["hook"] == ends["hook-before"] == ends["hook-every"] != ends["plain"]
    assert len(set(ends.values())) >= 12
    assert ends["plain"] != trained(3)["plain"]["ends"][0][0][0]
    # Without inputs of its own rank 1 has joined one step before rank 0.
    assert [len(end[0][1]) for end in trained(3)["uneven"]["ends"]] == [12, 11, 10]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_block_around_the_start_of_the_group(trained, ranks):
    early, plain = trained(ranks)["early"], trained(ranks)["plain"]
    assert early["early"] == plain["ends"][0][0]
    assert early["batch"] == plain["batch"]
    assert reader.read_run_info(Path(early["folder"])).status == "complete"
    check_spans(Path(early["folder"]), ranks)


@pytest.mark.parametrize(
    ("case", "parameters", "names"),
    [
        ("plain", 16 * 32 + 32 + 32 * 4 + 4, ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ("tied", 16 * 16 + 2 * 16 + 16 * 4 + 4, None),
    ],
)
def test_parameters_are_counted_once_and_frozen_ones_not(trained, case, parameters, names):
    (facts,) = reader.read_run_info(_folder(trained, case)).facts
    assert (facts.parameters, facts.gradient_bytes) == (parameters, 4 * parameters)
    names = names or ["one.weight", "one.bias", "two.bias", "last.weight", "last.bias"]
    assert [p.name for p in facts.reduced] == names


def _folder(trained, case, ranks=2):
    return Path(trained(ranks)[case]["folder"])


@pytest.mark.parametrize("case", ["plain", "compiled_ddp", "unused", "powersgd", "bucket_view"])
def test_steps_leave_no_time_out(trained, case):
    check_spans(_folder(trained, case, 3), 3)


def test_a_skipped_step_is_a_step(trained):
    spans = reader.read_rank(_folder(trained, "scaler"), 0).columns
    is_step = spans["kind"] == SpanKind.STEP
    assert np.unique(spans["index"][is_step]).tolist() == [1]
    assert spans["samples"][is_step].tolist() == [4] * 10


def test_ranks_that_no_launcher_has_started(tmp_path_factory):
    def launch():
        done = run_command([SCRIPTS / "spawned.py", place := tmp_path_factory.mktemp("spawned")])
        done.folder = place
        return done

    done = unaborted(launch)
    assert (done.code, done.out) == (0, "trained\n"), done.err
    for name in ("block", "line"):
        folder = done.folder / name
        for rank in range(2):
            spans = reader.read_rank(folder, rank)
            numbers = np.unique(spans.columns["step"][spans.columns["kind"] == SpanKind.STEP])
            assert (spans.complete, numbers.tolist()) == (True, list(range(10)))
        info = reader.read_run_info(folder)
        assert (info.status, info.world_size, info.settings["model"]) == ("complete", 2, "spawned")
        assert [(p.rank, p.local_rank, p.node) for p in info.ranks] == [(0, 0, 0), (1, 1, 0)]
        assert info.environment["0"]["local_world_size"] == 2
    assert "has failed" not in done.err
    # The line's end is that of the process.
    assert done.err.count("Run folder:") == 1
    assert f"Run folder: {done.folder / 'line'}" in done.err


@pytest.fixture
def late_now_and_then(tmp_path_factory):
    def measure():
        folder = tmp_path_factory.mktemp("late") / "run"
        ours = ["-m", "ddp_profiler.run", "--steps", 5, "--warmup", 2, "--every", 14]
        done = torchrun(2, *ours, "--out", folder, SCRIPTS / "late_now_and_then.py", 57)
        assert done.code == 1
        assert "so will 10 of every 14 be" in done.err
        return folder

    return Looks(measure)


@pytest.mark.alone
@timed
def test_a_straggler_of_some_windows_is_named_there(late_now_and_then):
    folder = late_now_and_then
    # A run that is killed keeps the windows that were over.
    info = reader.read_run_info(folder)
    assert info.status == "running"
    steps = reader.read_rank(folder, 1).columns
    numbers = np.unique(steps["step"][steps["variant"] != Variant.WARMUP])
    assert numbers.tolist() == [2 + 14 * w + i for w in range(4) for i in range(10)]
    shown = run_command(["-m", "ddp_profiler.cli", "analyze", folder, "--json"])
    summary = json.loads(shown.out)
    (level,) = summary["levels"]
    assert [w["first_step"] for w in level["windows"]] == [2, 16, 30, 44]
    assert [w["last_step"] for w in level["windows"]] == [11, 25, 39, 53]
    assert (level["steps"], level["batch_check"]["observed"]) == (20, 8)
    for window in level["windows"]:
        assert window["steps"] == 5
        late = {s["rank"]: s["lag_ms"] for s in window["stragglers"] if s["lag_ms"] > 50}
        if window["first_step"] == 30:
            assert list(late) == [1]
            assert 70 < late[1] < 200
            assert window["stragglers"][0]["cause"] == "other"
            assert window["stragglers"][0]["share_of_steps_fraction"] == 1
            assert window["step_ms"] > 110
        else:
            assert late == {}
            assert window["step_ms"] < 100
    table = run_command(["-m", "ddp_profiler.cli", "analyze", folder]).out
    assert re.search(r"4 windows of script +plain step +late \(ms\)", table)
    assert re.search(r"steps 30 to 39 +1\d\d +rank 1 by [\d.]+ in 100 % of steps", table)
