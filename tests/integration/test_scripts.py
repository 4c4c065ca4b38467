"""Unmodified scripts are observed and train as they would without us."""

import itertools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.record import reader
from ddp_profiler.schema import Interruption, SpanKind, Variant
from tests.integration.conftest import ROOT, run_command, serious, torchrun, unaborted

pytestmark = pytest.mark.distributed

SCRIPTS = Path(__file__).parent / "scripts"
# All other cases of train.py are in test_api.py, observed by the same code.
CASES = ("plain", "accumulation", "evaluation", "compiled_ddp")
NOTES = {
    "accumulation": [
        "An epoch of 56 samples on 2 ranks: windows of 2 leave 1 of 7 micro-steps over, "
        "which make a step of 1."
    ],
}
PHASES = (SpanKind.DATA, SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER)


def observe(folder, ranks, *argv, **keywords):
    ours = ["-m", "ddp_profiler.run", "--steps", 4, "--warmup", 2, "--out", folder]
    finished = torchrun(ranks, *ours, *argv, **keywords)
    finished.folder = folder
    return finished


@pytest.fixture(scope="module")
def alone():
    """What the script prints without us, by number of ranks and case."""

    def lines(ranks, cases):
        done = unaborted(lambda: torchrun(ranks, SCRIPTS / "train.py", *cases))
        assert done.code == 0, done.err
        return {(ranks, line.split()[0]): line + "\n" for line in done.out.splitlines()}

    return {**lines(2, CASES), **lines(3, ["accumulation"])}


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    known = {}

    def run(ranks, case):
        if (ranks, case) not in known:
            folder = tmp_path_factory.mktemp("script") / "run"
            argv = (SCRIPTS / "train.py", case)
            # From the beginning to the end as a user's.
            known[ranks, case] = observe(folder, ranks, *argv)
        return known[ranks, case]

    return run


@pytest.mark.parametrize(
    ("ranks", "case"), [*((2, case) for case in CASES), (3, "accumulation")], ids=str
)
def test_training_stays_what_it_was(observed, alone, ranks, case):
    run = observed(ranks, case)
    assert run.code == 0, run.err
    # Digests of weights and buffers, and all losses, of every rank.
    assert run.out == alone[ranks, case]
    assert "has failed" not in run.err
    level = run.level("script")
    accumulation = 2 if case == "accumulation" else 1
    setting = (level["micro_batch"], level["accumulation"], level["dp"])
    assert setting == (4, accumulation, ranks)
    assert level["batch_check"]["observed"] == 4 * accumulation * ranks
    assert level["batch_check"]["ok"]
    # Both steps of the warm-up; training stays what it was though gradients are read in them.
    assert level["noise_scale"]["steps"] == 2
    assert level["noise_scale"]["large_batch"] == level["batch_check"]["observed"]
    notes = [
        note.replace("56", f"{28 * ranks}").replace("2 ranks", f"{ranks} ranks")
        for note in NOTES.get(case, [])
    ]
    notes.append(
        "The gradient's scale cannot be told from the run alone; --replay "
        "package.module:function (replay= of profile()) compares it with one process."
    )
    if case == "accumulation":
        notes.append("The loss is divided by 2 before backward; accumulation is 2.")
    assert level["batch_check"]["notes"] == notes
    parts = level["breakdown_ms"]
    assert list(parts) == list(PARTS)
    assert sum(parts.values()) == pytest.approx(level["instrumented_step_ms"]["mean"])
    for name in ("data", "forward", "backward", "optimizer", "other"):
        assert parts[name] > 0, name
    check_spans(run.folder, ranks)
    assert not [note for note in level["notes"] if "dp = 1" in note]
    assert "?" not in run.err[run.err.index("train on") :].splitlines()[0]


def check_spans(folder, ranks):
    """Steps of a block leave no time out; phases lie in their step and do not overlap."""
    for rank in range(ranks):
        spans = reader.read_rank(folder, rank)
        assert spans.complete
        rows = [
            dict(zip(spans.columns, values, strict=True))
            for values in zip(*(v.tolist() for v in spans.columns.values()), strict=True)
        ]
        steps = [row for row in rows if row["kind"] == SpanKind.STEP]
        assert [row["step"] for row in steps] == list(range(10))
        assert [Variant(row["variant"]).name for row in steps] == [
            *2 * ["WARMUP"],
            *2 * ["PLAIN"],
            *4 * ["INSTRUMENTED"],
            *2 * ["PLAIN"],
        ]
        for one, next_one in itertools.pairwise(steps):
            if one["block"] == next_one["block"]:
                assert one["end_ns"] == next_one["begin_ns"]
        for step in steps:
            inside = [r for r in rows if r["step"] == step["step"] and r["kind"] in PHASES]
            if step["variant"] == Variant.PLAIN:
                assert inside == []
                continue
            inside.sort(key=lambda row: row["begin_ns"])
            assert {row["kind"] for row in inside} == set(PHASES)
            edges = [step["begin_ns"], *(r[k] for r in inside for k in ("begin_ns", "end_ns"))]
            edges.append(step["end_ns"])
            assert edges == sorted(edges)


def test_incomplete_windows_are_named_and_left_out(observed):
    run = observed(2, "accumulation")
    level = run.level("script")
    # 7 micro-steps an epoch: windows 3, 7 and 11 have one, of 4 samples on each rank.
    assert (
        "2 of 8 steps were incomplete and are left out of all figures (step 3: 1 of 2 "
        "micro-steps, 8 samples; step 7: 1 of 2 micro-steps, 8 samples)."
    ) in level["notes"]
    assert (level["steps"], level["ranks"][0]["steps"]) == (3, 3)
    assert level["comm"]["num_gradient_collectives_per_step"] == level["comm"]["num_buckets"] == 1
    assert [f["id"] for f in serious(run.summary)] == ["incomplete-windows"]


def test_evaluation_and_checkpoint_are_named_and_left_out(observed):
    run = observed(2, "evaluation")
    level = run.level("script")
    evaluation, saving = level["notes"][:2]
    assert evaluation.startswith("1 of 8 steps hold evaluation (mean ")
    assert evaluation.endswith("and are left out of all figures: step 5.")
    assert saving.startswith("1 of 8 steps hold saving (mean ")
    assert saving.endswith("and are left out of all figures: step 8.")
    assert (level["steps"], level["ranks"][0]["steps"]) == (3, 3)
    spans = reader.read_rank(run.folder, 0).columns
    is_one = spans["kind"] == SpanKind.INTERRUPTION
    # Two batches are fetched for the evaluation, and the model is called with each.
    evaluated = spans["index"][is_one] == Interruption.EVALUATION
    assert evaluated.tolist().count(True) == 4
    assert spans["step"][is_one].tolist() == [5 if one else 8 for one in evaluated]
    # The saving is in a plain step, and counts once for all that torch calls for it.
    assert spans["variant"][is_one][evaluated].tolist() == 4 * [Variant.INSTRUMENTED]
    assert spans["variant"][is_one][~evaluated].tolist() == [Variant.PLAIN]


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 3), ("sigterm", -15)])
def test_a_failing_rank_ends_as_it_would(tmp_path, how, code):
    run = observe(tmp_path / "run", 2, SCRIPTS / "failing.py", how)
    assert run.code == 1
    codes = {
        int(rank): int(found)
        for rank, found in re.findall(r"rank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+)", run.err)
    }
    assert codes[1] == code
    assert run.err.count("ValueError: planted") == (how == "raise")
    assert "ddp_profiler/script.py" not in run.err
    info = run.run_info
    # Nobody is left to say that a rank was killed.
    assert info["status"] in (("failed", "running") if how == "sigterm" else ("failed",))
    first = {"raise": "ValueError: planted", "exit": "sys.exit(3)"}.get(how)
    if first:
        assert first in [f["message"] for f in info["failures"] if f["rank"] == 1]
    shown = run_command(["-m", "ddp_profiler.cli", "analyze", run.folder])
    assert shown.code == 0, shown.err
    assert "PARTIAL" in shown.out
    assert "16 x" not in shown.out
    assert re.search(r"micro-batch x acc. x dp\s+4 x 1 x 2", shown.out)
    assert re.search(r"plain step \(median\)\s+\d", shown.out)


@pytest.mark.parametrize("words", [["surroundings.py", "2"], ["-m", "surroundings", "0"]])
def test_surroundings_are_those_of_python(tmp_path, words):
    files = [tmp_path / "alone.txt", tmp_path / "observed.txt"]
    ours = ["--module", *words[1:]] if words[0] == "-m" else words
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    alone = unaborted(lambda: run_command([*words, files[0]], cwd=SCRIPTS, env=rank))
    assert alone.code == 0, alone.err
    run = observe(tmp_path / "run", 1, *ours, files[1], cwd=SCRIPTS)
    assert (run.code, run.out) == (0, alone.out.replace(*map(str, files))), run.err
    # Once more from the child that was forked.
    assert [file.read_text() for file in files] == 2 * ["a line\na line\n"]
    assert "never built" not in run.err
    assert "found" in run.out
    assert run.level("script")["batch_check"]["observed"] == 2


def test_a_stderr_that_takes_nothing_changes_nothing(tmp_path):
    """It is full, as a disk can be, and closed by the script later."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    script = SCRIPTS / "unread.py"
    ours = ["-m", "ddp_profiler.run", "--steps", "2", "--warmup", "2", "--out", tmp_path / "run"]

    def run(*argv):
        # The shell puts stderr where nothing can be written.
        command = ["bash", "-c", 'exec "$@" 2>/dev/full', "bash", sys.executable, *map(str, argv)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), **rank}
        return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)

    with ThreadPoolExecutor(2) as pool:
        alone, seen = pool.map(lambda argv: run(*argv), [(script,), (*ours, script)])
    assert alone.returncode == 3
    assert (seen.returncode, seen.stdout) == (3, alone.stdout)
    info = reader.read_run_info(tmp_path / "run")
    assert [failure.message for failure in info.failures] == ["sys.exit(3)"]
    assert len(reader.read_rank(tmp_path / "run", 0)) > 0


@pytest.mark.parametrize(
    ("ranks", "how", "said"),
    [
        (1, "plain", "it trains without anything of the kind (3 steps of AdamW)."),
        (2, "fully_shard", "fully_shard (FSDP2) (3 steps of AdamW, on each of 2 ranks), which is"),
    ],
)
def test_a_script_without_ddp(tmp_path, ranks, how, said):
    run = observe(tmp_path / "run", ranks, SCRIPTS / "without_ddp.py", how)
    # Ranks may write into each other's lines.
    assert (run.code, run.out.replace("\n", "")) == (0, "trained" * ranks), run.err
    (text,) = re.findall(
        r"ddp_profiler.run: (DistributedDataParallel was never built .*\n.*\n)", run.err
    )
    assert said in text
    assert ("--model package.module:factory" in text) == (how == "plain")
    assert run.err.count("ddp_profiler.run: ") == 1
    assert run.run_info["levels"] == []


def test_two_runs_at_once_in_one_folder(tmp_path):
    def start(_):
        ours = ("-m", "ddp_profiler.run", "--steps", 2, "--warmup", 2)
        return torchrun(1, *ours, SCRIPTS / "train.py", "plain", cwd=tmp_path)

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(start, range(2)))
    folders = [re.search(r"Run folder: (.+)", run.err) for run in runs]
    assert all(folders), [run.err[-2000:] for run in runs]
    assert len({found[1] for found in folders}) == 2
    for run, found in zip(runs, folders, strict=True):
        run.folder = Path(found[1])
        assert run.level("script")["batch_check"]["observed"] == 4
        assert run.folder.parent == tmp_path / "runs"


def test_nothing_is_left_after_the_observed_steps(tmp_path):
    run = observe(tmp_path / "run", 1, SCRIPTS / "leftovers.py")
    assert run.code == 0, run.err
    first, last = run.out.splitlines()
    for name in (
        "DistributedDataParallel.forward",
        "DistributedDataParallel._sync_buffers",
        "torch.autograd.backward",
        "Optimizer.zero_grad",
        "_BaseDataLoaderIter.__next__",
        "torch.save",
        "torch.distributed.all_reduce",
        "_ObservedGroup",
        "hook Attachment._before_step",
    ):
        assert f"'{name}'" in first
    assert last == "last step: []"


def test_when_the_profiler_fails_training_goes_on(tmp_path, alone):
    run = observe(tmp_path / "run", 2, SCRIPTS / "sabotage.py")
    assert (run.code, run.out) == (0, alone[2, "plain"]), run.err
    said = re.findall(r"observing rank (\d) has failed .*planted: no space left", run.err)
    assert sorted(said) == ["0", "1"]
    assert "Traceback" not in run.err
    info = run.run_info
    assert info["status"] == "failed"
    assert [(f["rank"], f["phase"]) for f in info["failures"]] in (
        [(0, "observing"), (1, "observing")],
        [(1, "observing"), (0, "observing")],
    )
