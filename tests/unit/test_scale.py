"""Many ranks: planted causes are found, and condensed records give the figures of whole ones."""

import json
import queue
import shutil
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from ddp_profiler.analysis import findings, statistics, stragglers
from ddp_profiler.analysis.collectives import derive_collectives
from ddp_profiler.analysis.condensed import condense
from ddp_profiler.analysis.parts import derive_steps
from ddp_profiler.condensing import condensed_file, to_send
from ddp_profiler.config import StudyConfig
from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.load import load_report, load_summary
from ddp_profiler.measure import collect
from ddp_profiler.record import paths, reader
from ddp_profiler.record.parts import PartWriter, merge
from ddp_profiler.record.writer import SpanWriter
from ddp_profiler.schema import SpanKind, Variant
from tests.integration.conftest import load_benchmark
from tests.unit.ranks_as_threads import Store, at_once
from tests.unit.span_columns import MS, NULL, Spans
from tests.unit.test_collect import Wire

synthetic = load_benchmark("synthetic_runs")
RANKS = 17
KINDS = {
    "study": {},
    "script": {"script": True},
    "clocks": {"clocks": True, "seed": 3},
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def run(request, tmp_path_factory):
    """A folder of 17 ranks on 3 nodes, and what was planted in it."""
    folder = tmp_path_factory.mktemp("scale") / "run"
    truth = synthetic.write_run(
        folder, synthetic.planted(RANKS, 60, passing_share=0.3, **KINDS[request.param])
    )
    return folder, truth


def figures(folder):
    return msgspec.json.encode(load_summary(folder))


def condensed_copy(folder, out):
    out.mkdir()
    shutil.copy(paths.run_file(folder), out)
    for rank in paths.rank_files(folder):
        paths.rank_file(out, rank).write_bytes(condensed_file(folder, rank))
    return out


def test_planted_causes_are_found_by_name(run):
    folder, truth = run
    summary = load_summary(folder)
    (level,) = summary.levels
    assert not summary.run.partial
    assert "slow-node" not in {finding.id for finding in summary.findings}
    fixed, passing = truth["late"]
    found = {late.rank: late for late in level.stragglers}
    assert set(found) == {fixed["rank"], passing["rank"]}
    for planted, is_fixed in ((fixed, True), (passing, False)):
        late = found[planted["rank"]]
        assert (late.cause, late.fixed) == (planted["part"], is_fixed)
    # The passing one is last by what it is later than the fixed one.
    lag = passing["delay_ms"] - fixed["delay_ms"]
    assert found[passing["rank"]].lag_ms == pytest.approx(lag, abs=1)
    assert found[passing["rank"]].share_of_steps_fraction == pytest.approx(passing["steps"] / 60)


@pytest.mark.parametrize("clocks", [False, True])
def test_a_node_that_is_late_as_a_whole_is_named(tmp_path, clocks):
    truth = synthetic.write_run(tmp_path / "run", synthetic.slow_node(RANKS, 30, clocks=clocks))
    summary = load_summary(tmp_path / "run")
    (level,) = summary.levels
    assert level.stragglers == ()
    (found,) = [finding for finding in summary.findings if finding.id == "slow-node"]
    node = truth["late"][0]["node"]
    ranks = [rank for rank in level.ranks if rank.node == node]
    assert f"all {len(ranks)} ranks of {ranks[0].hostname} are late together" in found.message
    assert "most of it in forward, 12" in found.evidence
    assert found.expected_gain_ms == pytest.approx(truth["late"][0]["delay_ms"], abs=0.5)


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A level in which node 1 of 3 is 12 ms late in forward."""
    folder = tmp_path_factory.mktemp("slow") / "run"
    synthetic.write_run(folder, synthetic.slow_node(RANKS, 30))
    return load_summary(folder).levels[0]


def of_nodes(level, **changes):
    return list(findings._about_nodes(replace(level, **changes)))


def test_a_slow_node_is_named_above_bounds_only(slow):
    (found,) = of_nodes(slow)
    gap = found.expected_gain_ms
    # Twice the uncertainty of clocks, and 2 % of the step.
    assert of_nodes(slow, clock_uncertainty_ms=0.49 * gap)
    assert not of_nodes(slow, clock_uncertainty_ms=0.51 * gap)
    step = slow.instrumented_step_ms
    assert of_nodes(slow, instrumented_step_ms=replace(step, mean=49 * gap))
    assert not of_nodes(slow, instrumented_step_ms=replace(step, mean=51 * gap))
    # A node of one rank has a straggler, and one that another one is as slow as costs nothing.
    alone = [r for r in slow.ranks if r.node != 1 or r.rank == 8]
    assert not of_nodes(slow, ranks=tuple(alone))
    both = {**slow.lateness.fixed_ms, RANKS - 1: max(slow.lateness.fixed_ms.values())}
    assert not of_nodes(slow, lateness=replace(slow.lateness, fixed_ms=both))


def with_forward_ms(level, excess):
    """Node 1 spends so much more in forward than others, and is as late as before."""
    return tuple(
        replace(r, breakdown_ms={**r.breakdown_ms, "forward": 30.0 + excess * (r.node == 1)})
        for r in level.ranks
    )


def test_a_node_that_works_no_longer_than_others_is_not_blamed(slow):
    """As over a slow link, which gives its ranks the end of each reduction later."""
    assert not of_nodes(slow, ranks=with_forward_ms(slow, 0.0))
    assert not of_nodes(slow, ranks=with_forward_ms(slow, 5.0))
    (found,) = of_nodes(slow, ranks=with_forward_ms(slow, 7.0))
    assert "most of it in forward, 7.0" in found.evidence
    # Where it has half of the lag in several parts only, none is named.
    ranks = tuple(
        replace(r, breakdown_ms={**r.breakdown_ms, "data": 1.0 + 4.0 * (r.node == 1)})
        for r in with_forward_ms(slow, 4.0)
    )
    (found,) = of_nodes(slow, ranks=ranks)
    assert "most of it" not in found.evidence


def test_parts_are_those_that_were_planted(run):
    folder, truth = run
    parts = load_summary(folder).levels[0].breakdown_ms
    for part in ("data", "forward", "backward", "optimizer", "exposed_copy"):
        assert parts[part] == pytest.approx(truth[f"{part}_ms"], rel=1e-9)
    # Between nodes with clocks of their own by the offset's rounding at most.
    for part in ("exposed_wait", "exposed_transfer"):
        assert parts[part] == pytest.approx(truth[f"{part}_ms"], abs=0.05)


def test_same_seed_gives_the_same_folder_and_another_does_not(tmp_path):
    for name, seed in (("one", 5), ("same", 5), ("other", 6)):
        synthetic.write_run(tmp_path / name, synthetic.planted(2, 5, seed=seed))
    one, same, other = (
        paths.rank_file(tmp_path / n, 1).read_bytes() for n in ("one", "same", "other")
    )
    assert one == same
    assert len(one) == len(other)
    assert one != other


def test_condensed_records_give_the_same_summary_and_are_small(run, tmp_path):
    folder, _ = run
    small = condensed_copy(folder, tmp_path / "small")
    assert figures(small) == figures(folder)
    for rank, path in paths.rank_files(folder).items():
        assert reader.read_rank(small, rank).condensed
        assert not reader.read_rank(folder, rank).condensed
        assert 10 * paths.rank_file(small, rank).stat().st_size < path.stat().st_size


def test_a_record_contradicts_itself_alike_whole_condensed_and_beside_condensed_ones(tmp_path):
    """Nothing is lost with what condensing merges (collectives) or leaves out (torch.profiler)."""
    whole = tmp_path / "whole"
    synthetic.write_run(whole, synthetic.planted(4, 10))
    columns = {name: np.array(v) for name, v in reader.read_rank(whole, 1).columns.items()}
    gradients = np.flatnonzero(columns["kind"] == SpanKind.GRADIENT)
    columns["level"][gradients[-2:]] = 7
    traced = columns["variant"] == Variant.WARMUP
    columns["variant"][traced] = Variant.KINETO
    columns["begin_ns"][traced & (columns["kind"] == SpanKind.DATA)] -= 1_000 * MS
    for rank in (1, 3):
        rewrite(whole, rank, columns)
    small = condensed_copy(whole, tmp_path / "small")
    assert Variant.KINETO not in reader.read_rank(small, 1).columns["variant"]
    mixed = shutil.copytree(small, tmp_path / "mixed")
    shutil.copy(paths.rank_file(whole, 3), mixed)
    told = "The records of ranks 1, 3 have the same times to the ns"
    assert any(told in note for note in load_summary(whole).notes)
    assert any("spans of levels that the run has not" in n for n in load_summary(whole).notes)
    assert figures(whole) == figures(small) == figures(mixed)


def test_report_of_condensed_records_shows_buckets_as_one(run, tmp_path):
    folder, _ = run
    whole = load_report(folder).details[0].timeline
    small = load_report(condensed_copy(folder, tmp_path / "small")).details[0].timeline
    assert (small.step, small.lanes) == (whole.step, whole.lanes)
    assert (small.collectives, whole.collectives) == (25, 25)
    (bucket,) = small.buckets
    assert (bucket.first, bucket.last) == (0, 24)
    assert bucket.nbytes == sum(one.nbytes for one in whole.buckets)
    assert (bucket.begin_ms, bucket.end_ms) == (whole.buckets[0].begin_ms, whole.buckets[-1].end_ms)


def test_gathered_in_the_job_gives_the_summary_of_whole_records(run, tmp_path):
    """Each rank condenses its own file and sends that; rank 0 joins what came."""
    folder, _ = run
    home, away = tmp_path / "home", tmp_path / "away"
    shutil.copytree(folder, away)
    home.mkdir()
    shutil.copy(paths.run_file(folder), home)
    shutil.copy(paths.rank_file(folder, 0), home)
    senders = list(range(1, RANKS))
    store, lines = Store(), {rank: queue.Queue() for rank in senders}
    taken = []

    def take(rank, size, digest):
        taken.append(size)
        return PartWriter(home, rank, size, digest)

    def send(rank):
        return collect.hand_over(
            _Chunks(store, rank, lines),
            paths.rank_file(away, rank),
            lambda _: to_send(away, rank, "condensed", len(senders)),
        )

    failed, *alone = at_once(
        lambda: collect.collect(_Chunks(store, 0, lines), senders, take),
        *(lambda rank=rank: send(rank) for rank in senders),
    )
    assert failed == {}
    assert alone == [""] * len(senders)
    assert figures(home) == figures(folder)
    kept = sum(paths.rank_file(away, rank).stat().st_size for rank in senders)
    assert 10 * sum(taken) < kept


class _Chunks(Wire):
    """A wire for chunks of the real size."""

    def send(self, data):
        self.lines[self.rank].put(data)


def test_auto_sends_small_files_whole(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    synthetic.write_run(folder, synthetic.planted(2, 10))
    whole, small = paths.rank_file(folder, 1).read_bytes(), condensed_file(folder, 1)
    assert to_send(folder, 1, "auto", 1) == whole
    assert to_send(folder, 1, "whole", 10**6) == whole
    assert to_send(folder, 1, "condensed", 1) == small
    # All senders together count.
    monkeypatch.setattr("ddp_profiler.condensing.MOST_WHOLE_BYTES", 3 * len(whole))
    assert to_send(folder, 1, "auto", 3) == whole
    assert to_send(folder, 1, "auto", 4) == small
    with pytest.raises(UsageError, match="--collect"):
        StudyConfig(collect="half")


def test_record_that_was_cut_or_damaged_is_sent_as_it_is(tmp_path):
    folder = tmp_path / "run"
    synthetic.write_run(folder, synthetic.planted(2, 10))
    path = paths.rank_file(folder, 1)
    cut = path.read_bytes()[:-30]
    path.write_bytes(cut)
    assert to_send(folder, 1, "condensed", 1) == cut
    path.write_bytes(b"no stream")
    assert to_send(folder, 1, "condensed", 1) == b"no stream"


def rewrite(folder, rank, columns):
    stream = SpanWriter(folder, rank, reader.read_run_info(folder).run_id)
    stream.write_columns(columns)
    stream.close()


def test_merge_takes_the_whole_record_where_the_other_one_is_condensed(tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    synthetic.write_run(whole, synthetic.planted(2, 10))
    columns = {name: np.array(v) for name, v in reader.read_rank(whole, 0).columns.items()}
    columns["variant"][columns["variant"] == Variant.WARMUP] = Variant.KINETO
    rewrite(whole, 0, columns)
    small = condensed_copy(whole, tmp_path / "small")
    for given in ([small, whole], [whole, small]):
        shutil.rmtree(out, ignore_errors=True)
        merge(given, out)
        for rank in range(2):
            assert (
                paths.rank_file(out, rank).read_bytes() == paths.rank_file(whole, rank).read_bytes()
            )
    # Not of a record with a collective more, though all else is equal.
    fewer = np.flatnonzero(columns["kind"] == SpanKind.GRADIENT)[-1]
    rewrite(whole, 0, {name: np.delete(v, fewer) for name, v in columns.items()})
    with pytest.raises(InputError, match="Rank 0 has two different files"):
        merge([whole, small], tmp_path / "no")
    rewrite(whole, 0, columns)
    other = tmp_path / "other"
    synthetic.write_run(other, synthetic.planted(2, 10, jitter_ms=0.5))
    shutil.copy(paths.rank_file(other, 1), small)
    with pytest.raises(InputError, match="Rank 1 has two different files"):
        merge([whole, small], tmp_path / "no")
    paths.rank_file(small, 1).write_bytes(condensed_file(other, 1))
    with pytest.raises(InputError, match="Rank 1 has two different files"):
        merge([whole, small], tmp_path / "no")


def test_condensed_row_by_hand():
    spans = Spans().step(0, 100).backward(10, 60, 90)
    spans.gradient(20, 40, nbytes=10, index=0).gradient(30, None, nbytes=20, index=1)
    spans.gradient(50, 95, nbytes=30, index=2)
    columns = condense(spans.columns())
    row = columns["kind"] == SpanKind.GRADIENT
    found = {name: values[row].tolist() for name, values in columns.items()}
    assert found["index"] == [0]
    assert found["begin_ns"] == [20 * MS]
    assert found["last_begin_ns"] == [50 * MS]
    assert found["end_ns"] == [95 * MS]
    assert found["bytes"] == [60]
    assert (found["collectives"], found["unnoticed"]) == ([3], [1])
    # In flight from 20 until backward returns at 90; local backward ends at 60.
    assert (found["busy_ns"], found["overlapped_ns"]) == ([70 * MS], [40 * MS])
    assert len(columns["kind"]) == 4
    assert condense(columns) is columns
    assert derive_steps(0, columns, 0, Variant.INSTRUMENTED).unnoticed == 1
    twice = Spans().step(0, 100).backward(10, 60, 90).gradient(20, None).gradient(30, None)
    assert derive_steps(0, twice.columns(), 0, Variant.INSTRUMENTED).unnoticed == 2


@pytest.mark.parametrize("local_end", [40, 60])
def test_collectives_of_a_condensed_record_are_one_with_the_same_bounds(local_end):
    """Where a mark lies before the last hand-over, the next one ends local backward."""
    spans = Spans().step(0, 100).backward(10, local_end, 90)
    spans.add(SpanKind.LOCAL_BACKWARD_END, 70, 70)
    spans.gradient(20, 40, nbytes=10, index=0).gradient(50, 80, nbytes=30, index=1)
    whole, small = (
        derive_collectives(columns, 0, Variant.INSTRUMENTED, np.array([0]))
        for columns in (spans.columns(), condense(spans.columns()))
    )
    assert (len(whole), len(small)) == (2, 1)
    hidden = 60 if local_end == 60 else 70
    assert whole.hidden_until_ms.tolist() == [40, hidden]
    assert (small.begin_ms, small.hidden_until_ms, small.end_ms) == (20, hidden, 80)
    assert (small.nbytes, small.noticed) == (40, True)


def test_condensed_rows_are_one_a_ddp_and_micro_step_and_keep_lost_ends():
    spans = Spans().step(0, 100).backward(10, 60, 90)
    for ddp, micro_step in ((0, 0), (1, 0), (0, 1), (0, 0)):
        spans.gradient(20, None, value=ddp, micro_step=micro_step)
    columns = condense(spans.columns())
    row = columns["kind"] == SpanKind.GRADIENT
    places = zip(columns["value"][row], columns["micro_step"][row], strict=True)
    counts = dict(zip(places, columns["collectives"][row].tolist(), strict=True))
    assert counts == {(0, 0): 2, (1, 0): 1, (0, 1): 1}
    assert columns["end_ns"][row].tolist() == [NULL] * 3


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 9])
def test_others_median_is_that_without_the_rank(ranks):
    random = np.random.default_rng(ranks)
    # Few values, so that many are equal.
    for values in (random.normal(size=(ranks, 40)), random.integers(0, 3, (ranks, 40)) * 1.0):
        expected = [
            values[place] - np.median(np.delete(values, place, axis=0), axis=0)
            for place in range(ranks)
        ]
        np.testing.assert_array_equal(stragglers._beyond(values), expected)


@pytest.mark.parametrize("count", [2, 5, 60])
def test_bootstrap_of_many_means_is_that_of_each(count, monkeypatch):
    values = np.random.default_rng(count).normal(size=(count, 3))
    monkeypatch.setattr(statistics, "_WEIGHTS_AT_ONCE", 7 * count)
    found = statistics.mean_bootstrap(values)
    for place in range(3):
        expected = statistics.block_bootstrap(values[:, place], lambda v: np.mean(v, axis=-1))
        assert found[:, place] == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert statistics.mean_bootstrap(values[:1]) is None


def test_truth_is_kept_beside_the_record(run):
    folder, truth = run
    kept = json.loads((folder / synthetic.TRUTH_FILE).read_text())
    assert kept == json.loads(json.dumps(truth))
