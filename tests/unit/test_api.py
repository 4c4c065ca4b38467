"""A program that observes itself: a block or a line of its own, in this process alone."""

import contextlib
import io
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import ddp_profiler
from ddp_profiler import api
from ddp_profiler import run as worker
from ddp_profiler.errors import UsageError
from ddp_profiler.load import load_summary
from ddp_profiler.measure import ddp_adapter
from ddp_profiler.measure.bounded import within
from ddp_profiler.measure.scripts.default_group import find_place
from ddp_profiler.measure.topology import Topology
from ddp_profiler.observe.observation import Observation
from ddp_profiler.record import reader
from ddp_profiler.schema import SpanKind, Variant
from tests.integration.conftest import run_command, unaborted

from .test_attachment import ours

SHORT = {"steps": 2, "warmup": 2}


@pytest.fixture(autouse=True)
def lone(process_group, tmp_path, monkeypatch):
    """A program without a launcher, in a folder of its own."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    assert ours() == set()
    assert not ddp_adapter.is_installed()
    assert Observation.current is None


def model():
    torch.manual_seed(0)
    return DDP(nn.Linear(3, 2))


def train(ddp, steps, at=lambda step: None):
    """Trains and returns the weights that it ends with."""
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step, batch in enumerate(DataLoader(torch.ones(2 * steps, 3), batch_size=2)):
        at(step)
        sgd.zero_grad()
        ddp(batch).sum().backward()
        sgd.step()
    return [p.detach().clone() for p in ddp.parameters()]


def steps_of(folder, rank=0):
    """Steps on record as (number, variant)."""
    spans = reader.read_rank(folder, rank).columns
    is_step = spans["kind"] == SpanKind.STEP
    return list(
        zip(spans["step"][is_step].tolist(), map(Variant, spans["variant"][is_step]), strict=True)
    )


WINDOW = [Variant.PLAIN, Variant.INSTRUMENTED, Variant.INSTRUMENTED, Variant.PLAIN]
WHOLE = list(enumerate([Variant.WARMUP, Variant.WARMUP, *WINDOW]))


def test_a_block_observes_and_leaves_weights_alone(capsys, tmp_path):
    expected = train(model(), 8)
    with ddp_profiler.profile(**SHORT, out=tmp_path / "run") as run:
        weights = train(model(), 8)
        # What was recorded can be looked at before the block ends.
        assert run.summary.levels[0].dp == 1
    assert all(map(torch.equal, weights, expected))
    out, err = capsys.readouterr()
    assert out == ""
    assert "2 + 4 steps were observed; training goes on without us." in err
    assert "micro-batch x acc. x dp" in err
    assert f"Run folder: {tmp_path / 'run'}" in err
    assert (tmp_path / "run" / "summary.json").is_file()
    level = run.summary.levels[0]
    assert (level.micro_batch, level.dp, level.steps, level.batch_check.observed) == (2, 1, 2, 2)
    assert "micro-batch x acc. x dp" in run.report()
    assert steps_of(run.folder) == WHOLE
    info = reader.read_run_info(run.folder)
    assert (info.status, info.world_size, info.settings["script"]) == ("complete", 1, None)


def test_a_model_that_was_there_before_and_two_blocks(tmp_path):
    ddp = model()
    train(ddp, 1)
    before = train(model(), 1)
    folders = []
    for _ in range(2):
        with ddp_profiler.profile(**SHORT, show=False) as run:
            train(ddp, 4)
            train(ddp, 4)
        folders.append(run.folder)
        assert ours() == set()
        assert steps_of(run.folder) == WHOLE
        level = run.summary.levels[0]
        assert level.comm.num_gradient_collectives_per_step == 1
        assert level.comm.gradient_bytes == 4 * 8
        train(ddp, 2)
    # Within a second, and still apart.
    assert len(set(folders)) == 2
    assert {folder.parent for folder in folders} == {tmp_path / "runs"}
    assert not list(tmp_path.rglob("summary.json"))
    again = model()
    assert all(map(torch.equal, before, train(again, 1)))


def test_a_hook_of_the_user_is_seen_again_in_the_second_block():
    calls = []

    def hook(state, bucket):
        calls.append(bucket.buffer().numel())
        return (
            dist.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
        )

    with ddp_profiler.profile(**SHORT, show=False) as first:
        ddp = model()
        ddp.register_comm_hook(None, hook)
        train(ddp, 8)
    train(ddp, 1)
    with ddp_profiler.profile(**SHORT, show=False) as second:
        train(ddp, 8)
    assert calls == [8] * 17
    for run in (first, second):
        comm = run.summary.levels[0].comm
        assert comm.sources["gradient_collectives"] == "user_hook"
        assert comm.num_gradient_collectives_per_step == 1


def test_a_hook_that_was_there_before_is_not_claimed_to_be_seen():
    ddp = model()
    ddp.register_comm_hook(
        None,
        lambda state, bucket: (
            dist.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
        ),
    )
    with ddp_profiler.profile(**SHORT, show=False) as run:
        train(ddp, 8)
    comm = run.summary.levels[0].comm
    assert comm.sources["gradient_collectives"] is None
    assert comm.gradient_bytes is None


def test_an_exception_passes_through_and_the_run_is_partial(capsys):
    def planted(step):
        if step == 5:
            raise KeyError("planted")

    run = ddp_profiler.profile(**SHORT)
    with pytest.raises(KeyError, match="planted") as caught, run:
        train(model(), 8, planted)
    assert type(caught.value) is KeyError
    info = reader.read_run_info(run.folder)
    assert info.status == "failed"
    assert [(f.rank, f.phase, f.message) for f in info.failures] == [
        (0, "training", "KeyError: 'planted'")
    ]
    assert "PARTIAL" in capsys.readouterr().err
    assert steps_of(run.folder) == WHOLE[:5]
    assert run.summary.run.partial


@pytest.mark.parametrize(
    ("steps", "words"), [(2, "only 2 optimizer steps were seen"), (0, "never built or called")]
)
def test_a_loop_that_ends_before_the_plan(capsys, steps, words):
    with ddp_profiler.profile(**SHORT) as run:
        if steps:
            train(model(), steps)
    assert words in capsys.readouterr().err
    assert reader.read_run_info(run.folder).status == "complete"
    with ddp_profiler.profile(**SHORT) as run:
        train(model(), 4)
    assert steps_of(run.folder) == WHOLE[:4]
    assert run.summary.levels[0].steps == 1


def test_a_block_in_which_nothing_is_recorded_has_no_figures(capsys):
    """Plain training, or nothing at all: no error, and one line that says so."""
    for steps in (0, 6):
        with ddp_profiler.profile(**SHORT) as run:
            assert run.summary is None
            if steps:
                train(nn.Linear(3, 2), steps)
        assert run.summary is None
        assert run.report() == (
            f"Nothing to show on rank 0: no step was recorded. Run folder: {run.folder}"
        )
    # What is said of training without DDP keeps the launcher's own options.
    err = capsys.readouterr().err
    assert "torchrun" in err
    assert "standalone=" not in err
    assert "nproc_per_node=" not in err.replace("--nproc_per_node=", "")


def test_samples_that_do_not_pass_through_ddp_are_not_known():
    with ddp_profiler.profile(**SHORT, show=False) as run:
        ddp = model()
        sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(8):
            sgd.zero_grad()
            ddp.module(torch.ones(2, 3)).sum().backward()
            sgd.step()
    level = run.summary.levels[0]
    assert level.step_ms is not None
    assert (level.micro_batch, level.global_batch, level.samples_per_s) == (None, None, None)
    assert "1 x 1 x 1" not in run.report()


def test_a_line_and_its_end(capsys):
    run = ddp_profiler.attach(**SHORT)
    with pytest.raises(UsageError, match="observed already"):
        ddp_profiler.attach()
    with pytest.raises(UsageError, match="observed already"), ddp_profiler.profile():
        pass
    train(model(), 5)
    assert ddp_profiler.detach() is run
    assert run.detach() is run
    assert capsys.readouterr().err.count("Run folder:") == 1
    assert steps_of(run.folder) == WHOLE[:5]
    with pytest.raises(UsageError, match="Nothing is attached"):
        ddp_profiler.detach()
    with pytest.raises(UsageError, match="used already"), run:
        pass


def test_windows_over_a_long_training(capsys):
    seen = {}

    def look(step):
        if step in (8, 18):
            seen[step] = load_summary(run.folder), reader.read_run_info(run.folder).status
            assert run._observation._attachment.ddps == []
            assert not any(kind in str(ours()) for kind in ("all_reduce", "wait"))

    expected = train(model(), 30)
    with ddp_profiler.profile(**SHORT, every=10) as run:
        weights = train(model(), 30, look)
    assert all(map(torch.equal, weights, expected))
    windows = [(10 * w + 2 + i, v) for w in range(3) for i, v in enumerate(WINDOW)]
    assert steps_of(run.folder) == [*WHOLE[:2], *windows]
    # Of a run that is killed between two windows all before them is there.
    for step, count in ((8, 1), (18, 2)):
        summary, status = seen[step]
        assert status == "running"
        assert summary.levels[0].steps == 2 * count
    assert reader.read_run_info(run.folder).status == "complete"
    assert [w.first_step for w in run.summary.levels[0].windows] == [2, 12, 22]
    err = capsys.readouterr().err
    assert err.count("2 + 4 steps were observed; so will 4 of every 10 be.") == 1
    spans = reader.read_rank(run.folder, 0).columns
    forwards = spans["step"][spans["kind"] == SpanKind.FORWARD].tolist()
    assert forwards == [0, 1, 3, 4, 13, 14, 23, 24]


def test_a_window_without_a_call_of_ddp_keeps_what_is_known(capsys):
    """The models were let go of before it; other training goes on meanwhile."""
    ddp = model()
    with ddp_profiler.profile(**SHORT, every=10) as run:
        train(ddp, 9)
        train(nn.Linear(3, 2), 10)
        known = reader.read_run_info(run.folder)
        train(ddp, 9)
    err = capsys.readouterr().err
    assert "has failed" not in err
    info = reader.read_run_info(run.folder)
    assert info.status == "complete"
    assert (info.levels, info.facts[0].reduced) == (known.levels, known.facts[0].reduced)
    (level,) = run.summary.levels
    assert (level.micro_batch, level.dp, level.comm.num_buckets) == (2, 1, 1)
    # Steps 12 to 15 were observed all the same.
    assert [w.first_step for w in level.windows] == [2, 12, 22]


class Unread:
    """A stderr whose reader has gone."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    flush = isatty = fileno = write


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    "stream",
    [closed, lambda: open("/dev/full", "w"), Unread, lambda: None],
    # Not what str gives: with addresses, processes that share tests out would not agree on them.
    ids=["closed", "full", "unread", "none"],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_stderr_that_takes_nothing_changes_nothing(capsys, monkeypatch, stream, fails):
    def full(*_):
        raise OSError("planted")

    expected = train(model(), 8)
    given = stream()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", given)
        with ddp_profiler.profile(**SHORT, expect_global_batch=99) as run:
            if fails:
                patch.setattr("ddp_profiler.record.writer.SpanWriter.write", full)
            weights = train(model(), 8)
    with contextlib.suppress(OSError, AttributeError):
        given.close()
    assert all(map(torch.equal, weights, expected))
    # Nor does it go where the program's own words are.
    assert capsys.readouterr().out == ""
    status = reader.read_run_info(run.folder).status
    assert status == ("failed" if fails else "complete")


@pytest.mark.parametrize("stream", [closed, lambda: open("/dev/full", "w"), Unread, lambda: None])
def test_the_worker_says_nothing_where_nobody_reads(capsys, monkeypatch, stream):
    given = stream()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", given)
        worker._say("one\ntwo")
    with contextlib.suppress(OSError, AttributeError):
        given.close()
    assert capsys.readouterr().out == ""


def test_a_failure_of_ours_lets_go_of_what_replay_keeps(capsys, monkeypatch, tmp_path):
    """It is a copy of the model and its gradients, for which nobody has use any more."""
    (tmp_path / "kept_oracle.py").write_text("def loss(module, batches):\n    return None\n")
    monkeypatch.syspath_prepend(tmp_path)
    kept = {}

    def look(step):
        step_kept = run._observation._oracle.kept
        kept[step] = step_kept.model is not None
        if step == 2:
            assert kept[step]
            run._observation._step_aside(OSError("planted"))
            assert step_kept.problem == "observing has failed"
            assert (step_kept.model, step_kept.share) == (None, None)

    options = {"steps": 2, "warmup": 3, "replay": "kept_oracle:loss"}
    with ddp_profiler.profile(**options, show=False) as run:
        train(model(), 9, look)
    assert kept[2]
    assert "planted" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_from_before_is_not_that_of_the_training(monkeypatch, when):
    """In a notebook the last error that nobody caught stays known for good."""

    def fail():
        monkeypatch.setattr(sys, "last_value", ValueError("planted"), raising=False)

    if when == "before":
        fail()
    run = ddp_profiler.attach(**SHORT, show=False)
    train(model(), 8)
    if when == "after":
        fail()
    api._end_at_exit(run)
    info = reader.read_run_info(run.folder)
    assert info.status == ("complete" if when == "before" else "failed")
    assert len(info.failures) == (when == "after")


def test_a_script_that_is_observed_already(capsys, monkeypatch, tmp_path):
    class Run:
        observes_a_script = True
        folder = tmp_path / "run"

    with ddp_profiler.profile(**SHORT, out=Run.folder, show=False):
        expected = train(model(), 6)
    monkeypatch.setattr(Observation, "current", Run())
    with ddp_profiler.profile() as run:
        assert all(map(torch.equal, train(model(), 6), expected))
        assert ours() == set()
    assert run.folder == tmp_path / "run"
    # That run's own figures can be asked for.
    assert run.summary.levels[0].steps == 2
    assert ddp_profiler.attach().detach().folder == tmp_path / "run"
    err = capsys.readouterr().err
    assert err.count("ddp_profiler.run observes this script; the line in it does nothing.") == 2
    assert ours() == set()
    monkeypatch.setattr(Observation, "current", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0 is below 1.\nGive steps=1 or more."),
        ({"warmup": 1}, "warmup=1 is below 2"),
        ({"batch_dim": -1}, "batch_dim=-1 is below 0"),
        ({"expect_global_batch": 0}, "expect_global_batch=0 is below 1"),
        ({"timeout": 0}, "timeout=0 is no time"),
        ({"steps": 5, "every": 10}, "every=10 is not above 10, the length of a window"),
    ],
)
def test_settings_out_of_range(options, message):
    with pytest.raises(UsageError) as error:
        ddp_profiler.profile(**options)
    assert message in str(error.value)


def test_the_folder_is_shown_without_ways_back(tmp_path, capsys):
    (tmp_path / "here").mkdir()
    with ddp_profiler.profile(**SHORT, out="here/../run") as run:
        train(model(), 6)
    assert run.folder == tmp_path / "run"
    assert "/../" not in capsys.readouterr().err


def test_a_folder_that_is_taken_is_refused_before_training(tmp_path):
    with ddp_profiler.profile(**SHORT, out=tmp_path / "run", show=False):
        train(model(), 3)
    again = ddp_profiler.profile(out=str(tmp_path / "run"))
    with pytest.raises(UsageError, match="already holds a run"), again:
        raise AssertionError("not reached")
    assert ours() == set()


def test_the_global_batch_that_is_expected(capsys):
    with ddp_profiler.profile(**SHORT, expect_global_batch=4):
        train(model(), 8)
    assert (
        "The global batch is not 4 samples a step; observed: script 2." in capsys.readouterr().err
    )


def test_if_something_of_ours_fails_it_is_said_once(capsys, monkeypatch):
    def full(*_):
        raise OSError("planted")

    expected = train(model(), 8)
    with ddp_profiler.profile(**SHORT) as run:
        monkeypatch.setattr("ddp_profiler.record.writer.SpanWriter.write", full)
        weights = train(model(), 8)
    assert all(map(torch.equal, weights, expected))
    err = capsys.readouterr().err
    assert err.count("planted") == 1
    assert "debug=True shows the stack trace" in err
    assert reader.read_run_info(run.folder).status == "failed"


def test_the_place_of_a_group_that_was_started(monkeypatch):
    assert find_place() == (Topology(0, 0, 1, 1, launched=False), None)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    place, store = find_place()
    assert place == Topology(3, 3, 4, 4, launched=False)
    assert store is not None
    launcher = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**launcher, "MASTER_ADDR": "host", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert find_place()[0] == Topology(3, 1, 4, 2, launched=True)
    # Variables of a launcher that started another group do not count.
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert find_place()[0] == Topology(3, 3, 4, 4, launched=False)


PROGRAM = """
import sys
import torch
import torch.distributed as dist
import ddp_profiler
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp_profiler.attach(steps=2, warmup=2, out="run")
model = DDP(torch.nn.Linear(3, 2))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    if step == int(sys.argv[1]):
        raise ValueError("planted")
    model(torch.ones(2, 3)).sum().backward()
    sgd.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("at", "code", "status"), [(9, 0, "complete"), (5, 1, "failed")])
def test_a_line_that_ends_with_the_process(tmp_path_factory, at, code, status):
    def launch():
        place = tmp_path_factory.mktemp("program")
        (place / "program.py").write_text(PROGRAM)
        done = run_command(["program.py", at], cwd=place)
        done.folder = place / "run"
        return done

    done = unaborted(launch)
    assert (done.code, done.out) == (code, ""), done.err
    assert done.err.count("ValueError: planted\n") == (2 if code else 0)
    assert "Run folder:" in done.err
    info = done.run_info
    assert (info["status"], info["settings"]["model"]) == (status, "program")
    messages = [failure["message"] for failure in info["failures"]]
    assert messages == (["ValueError: planted"] if code else [])


def test_where_no_thread_can_be_started_a_call_is_made_all_the_same(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert within(1.0, lambda: 7) == 7


def test_importing_it_needs_no_torch():
    code = "import sys, ddp_profiler; dir(ddp_profiler); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
