"""Findings: each where its cause was planted, and nowhere else."""

import json

import pytest

from ddp_profiler.report import traces
from ddp_profiler.trace.analysis import analyse
from ddp_profiler.trace.gather import read_ranks
from ddp_profiler.trace.idle import launched_late_fraction
from ddp_profiler.trace.reader import read_trace
from ddp_profiler.trace.split import split
from ddp_profiler.trace.timeline import write_timeline

from .kineto import Recording
from .traced_job import Call, make_job


def found_in(job, tmp_path, **how):
    found = read_ranks([job.write(tmp_path / "job", **how)])
    return {one.id: one for one in analyse(found).findings}


def busy(job):
    """Fills each rank's GPU, so that nothing idles and all is overlapped."""
    for made in job.recordings.values():
        steps = max(met.step for met in job.met) + 1
        for place in range(steps * 1000):
            at = place * 10_000
            made.kernel(at, 10_000, stream=8, launched=max(0, at - 400_000))
    return job


def test_a_late_rank_is_named_with_its_figures(tmp_path):
    job = make_job(lag=lambda step, place, rank: 700_000 if rank == 3 else 1000 * rank, steps=4)
    one = found_in(job, tmp_path)["late-rank"]
    assert one.severity == "warning"
    assert one.message.startswith("Rank 3 comes late in nearly every step (4 of 4)")
    assert "8.38 ms" in one.message
    assert "last in 12 of 12 collectives, 0.70 ms (median)" in one.evidence
    assert "of the 4 ranks given" in one.evidence


def test_a_rank_that_is_late_now_and_then_is_told_as_such(tmp_path):
    job = make_job(
        lag=lambda step, place, rank: 800_000 if (rank, step) == (1, 2) else 500 * rank, steps=5
    )
    one = found_in(job, tmp_path)["late-rank"]
    assert "Rank 1 comes late now and then (in 3 collectives by more than 5 times" in one.message
    assert one.severity == "info"


def test_ranks_that_are_late_together(tmp_path):
    job = make_job(world=6, lag=lambda s, p, rank: 700_000 + rank if rank in (2, 5) else rank)
    for made in job.recordings.values():
        made.events = [e for e in made.events if "sgemm" not in e["name"]]
    found = found_in(job, tmp_path)
    assert "late-rank" not in found
    assert found["late-ranks"].message.startswith("Ranks 2, 5 come late together")


def test_exposed_communication_says_what_it_is(tmp_path):
    job = make_job(lag=lambda step, place, rank: 700_000 if rank == 2 else 0)
    one = found_in(job, tmp_path)["exposed-communication"]
    assert "waiting for other ranks, so faster links" in one.message
    (tmp_path / "b").mkdir()
    job = make_job(script=[Call(elements=size) for size in range(1, 10)], lag=lambda *_: 0)
    for made in job.recordings.values():
        made.events = [e for e in made.events if "sgemm" not in e["name"]]
    one = found_in(job, tmp_path / "b")["exposed-communication"]
    assert "Most of it is transfer" in one.message
    (tmp_path / "c").mkdir()
    one = found_in(job, tmp_path / "c", leave_out=[1, 2, 3])["exposed-communication"]
    assert "cannot be told" in one.message


def test_waiting_for_a_missing_rank_is_not_called_transfer(tmp_path):
    """Rank 2 is late each time, and its trace is not here: nobody knows what the others do."""
    job = make_job(lag=lambda step, place, rank: 700_000 if rank == 2 else 1000 * rank)
    for made in job.recordings.values():
        made.events = [e for e in made.events if "sgemm" not in e["name"]]
    folder = job.write(tmp_path / "job", leave_out=[2, 3])
    ranks = read_ranks([folder])
    analysis = analyse(ranks)
    one = {finding.id: finding for finding in analysis.findings}["exposed-communication"]
    assert "waiting for ranks whose traces are missing" in one.message
    assert "faster links" not in one.message
    assert "exposed transfer" not in one.evidence
    shown = traces.as_json(ranks, analysis)
    assert {found["transfer_us"] for found in shown["collectives"]} == {None}
    assert {found["busbw_gb_per_s"] for found in shown["collectives"]} == {None}
    # What the ranks given wait for each other is known.
    assert {found["wait_us_by_rank"]["0"] for found in shown["collectives"]} == {1.0}
    assert [rate["busbw_gb_per_s"] for rate in shown["bandwidth"]] == [None]
    for one in ranks.ranks:
        total = analysis.across.waiting_total[one.rank]
        assert (total.transfer_ns, total.exposed_transfer_ns) == (None, None)
        assert total.exposed_wait_ns + total.exposed_untold_ns == one.total.exposed_comm_ns
    assert analysis.across.waiting_total[0].exposed_wait_ns == 9 * 1000
    write_timeline(tmp_path / "t.json", ranks.ranks, analysis.across)
    names = {
        event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    }
    assert {"exposed wait", "exposed communication", "AllReduce wait", "AllReduce"} <= names
    assert not {name for name in names if "transfer" in name}


def test_evidence_of_one_rank_names_no_worst(tmp_path):
    job = make_job(1, world=2, lag=lambda step, place, rank: 700_000 * rank)
    found = found_in(job, tmp_path, leave_out=[1])
    assert {"exposed-communication", "gpu-idle"} <= set(found)
    assert not [one for one in found.values() if "most on rank" in one.evidence]
    assert "idle " in found["gpu-idle"].evidence


def test_a_busy_balanced_job_has_no_findings(tmp_path):
    job = busy(make_job(1, world=2, steps=2, lag=lambda *_: 0))
    assert found_in(job, tmp_path) == {}


def gaps(launch_before):
    """Kernels of 100 us every 300 us, each launched so long before it begins."""
    made = Recording(world_size=1)
    for place in range(20):
        at = 1_000_000 + place * 300_000
        made.kernel(at, 100_000, launched=at - launch_before)
    return made


@pytest.mark.parametrize(
    ("launch_before", "fraction"), [(0, 1.0), (50_000, 0.75), (100_000, 0.5), (250_000, 0.0)]
)
def test_why_a_gpu_idles(launch_before, fraction, tmp_path):
    made = gaps(launch_before)
    found = split(read_trace(made.write(tmp_path / "rank0.json")), 0)
    assert launched_late_fraction(found) == pytest.approx(fraction)


def test_idling_without_launches_is_not_explained(tmp_path):
    made = gaps(0)
    made.events = [e for e in made.events if e["cat"] == "kernel"]
    found = split(read_trace(made.write(tmp_path / "rank0.json")), 0)
    assert launched_late_fraction(found) is None


@pytest.mark.parametrize(("launch_before", "said"), [(0, True), (250_000, False)])
def test_an_idle_gpu_is_launch_bound_only_where_launches_show_it(launch_before, said, tmp_path):
    gaps(launch_before).write(tmp_path / "rank0.json")
    findings = {one.id: one for one in analyse(read_ranks([tmp_path])).findings}
    one = findings["gpu-idle"]
    assert "65.5 %" in one.message
    assert ("launch bound" in one.message) == said


def test_missing_ranks_are_a_finding(tmp_path):
    one = found_in(make_job(1, world=5), tmp_path, leave_out=[1, 3])["ranks-missing"]
    assert "Traces of ranks 1, 3 are missing" in one.message
    assert one.evidence == "3 of 5 ranks given"
