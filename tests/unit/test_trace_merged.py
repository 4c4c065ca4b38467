"""Several processes with one pid in a file, steps of one number, text that is missing, sums."""

import json

import numpy as np
import pytest

from ddp_profiler.errors import InputError
from ddp_profiler.report import traces
from ddp_profiler.trace.across import compare
from ddp_profiler.trace.gather import read_ranks
from ddp_profiler.trace.matching import _fitting_shifts, _scatter_ns
from ddp_profiler.trace.reader import read_trace
from ddp_profiler.trace.split import split

from .kineto import ALL_REDUCE, PID, Recording, number, training
from .traced_job import make_job


def counts(trace):
    return {warning.code: warning.count for warning in trace.warnings}


def named(made, name):
    made.events.append(
        {"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "ts": number(made.origin_ns),
         "args": {"name": name}}
    )  # fmt: skip
    return made


def merged(one, other):
    one.events += other.events
    return one


@pytest.fixture
def hosts():
    """Two recordings of other processes with the same pid."""
    return [training(seed, rank=seed, steps=9)[0] for seed in range(2)]


def test_two_processes_with_one_pid_are_told_by_their_names(hosts, tmp_path):
    one, other = (named(made, name) for made, name in zip(hosts, ("rank 0", "rank 1"), strict=True))
    path = merged(one, other).write(tmp_path / "rank0.json")
    with pytest.raises(InputError, match="several processes with the same pid") as raised:
        read_trace(path)
    assert str(path) in raised.value.message
    assert f"pid {PID} has the names rank 0 and rank 1" in raised.value.message
    assert "one file a rank" in raised.value.remedy


def test_two_processes_with_one_pid_are_told_by_their_threads(hosts, tmp_path):
    one, other = (named(made, "python3") for made in hosts)
    for event in other.events:
        if event["tid"] == PID:
            event["tid"] = PID + 1
    path = merged(one, other).write(tmp_path / "rank0.json")
    with pytest.raises(InputError, match=r"threads 471[12] and 471[12] are in ProfilerStep#"):
        read_trace(path)


def test_two_processes_with_one_thread_are_told_by_its_steps(hosts, tmp_path):
    """A thread cannot be in one step twice at once, partly."""
    path = merged(*(named(made, "python3") for made in hosts)).write(tmp_path / "rank0.json")
    with pytest.raises(InputError, match=r"thread 4711 is in ProfilerStep#0 and ProfilerStep#\d"):
        read_trace(path)


def overlapping(share):
    """Two steps, of which this share of the shorter one is in both, on two threads."""
    made = Recording()
    made.kernel(10, 20, launched=5)
    made.step(1, 0, 100_000)
    made.step(2, 100_000 - int(share * 50_000), 50_000, tid=PID + 1)
    return made


def test_steps_of_two_threads_may_overlap_by_half(tmp_path):
    path = overlapping(0.4).write(tmp_path / "rank0.json")
    assert len(read_trace(path).marks) == 2
    with pytest.raises(InputError, match="at once"):
        read_trace(overlapping(0.6).write(path))


def test_an_annotation_that_is_twice_in_a_file_is_no_other_process(tmp_path):
    made = Recording()
    made.kernel(10, 20, launched=5)
    for begin, length in ((0, 100_000), (0, 100_000), (0, 90_000), (5000, 90_000)):
        made.step(1, begin, length)
    made.step(2, 98_500, 100_000)
    found = split(read_trace(made.write(tmp_path / "rank0.json")), 0)
    assert counts(found)["repeated_step"] == 3
    assert [step.step.label for step in found.steps] == ["1", "2"]


def test_what_may_be_two_processes_is_said(tmp_path):
    """Same pid, thread, names and numbers of steps, one after the other: nothing is certain."""
    one, other = (named(training(seed, steps=9)[0], "python3") for seed in range(2))
    for event in other.events:
        if "ProfilerStep" in event["name"]:
            event["ts"] = number(round(float(event["ts"].strip("@")) * 1000) + 10**9)
    found = read_trace(merged(one, other).write(tmp_path / "rank0.json"))
    assert counts(found)["repeated_step"] == 9
    assert "figures are sums of theirs" in found.warnings[0].message
    assert counts(split(found, 0))["streams_overlap"] > 10


@pytest.mark.parametrize("key", ["traceEvents", "distributedInfo"])
def test_a_key_that_is_there_twice_is_refused(key, tmp_path):
    made, _ = training(1)
    text = made.text()
    value = json.dumps(made.metadata().get(key, [])).encode()
    path = tmp_path / "rank0.json"
    path.write_bytes(b'{"%s": %s, ' % (key.encode(), value) + text[1:])
    with pytest.raises(InputError, match=f"has {key} twice, the second at byte"):
        read_trace(path)


def test_one_process_is_none_of_this(tmp_path):
    made = named(named(training(1)[0], "python3"), "python3")
    # Steps of one thread, and annotations of the GPU, may touch or repeat on streams.
    for stream in (7, 20):
        made.event("gpu_user_annotation", "ProfilerStep#0", 0, 10_000, pid=0, tid=stream)
    found = split(read_trace(made.write(tmp_path / "rank0.json")), 0)
    assert not set(counts(found)) & {"repeated_step", "streams_overlap", "joined_events"}


def test_steps_of_one_number_are_counted(tmp_path):
    made = Recording()
    for begin in (0, 1000, 2000):
        made.step(5, begin, 900)
    made.step(6, 3000, 900)
    made.kernel(10, 20, launched=5)
    found = read_trace(made.write(tmp_path / "rank0.json"))
    assert counts(found)["repeated_step"] == 2
    assert "ProfilerStep#5, 3 times" in found.warnings[0].message


@pytest.mark.parametrize("on_gpu", [False, True])
def test_steps_of_one_number_are_kept_apart(on_gpu, tmp_path):
    """A recording that counts anew: no step takes in the work of those between."""
    made = Recording()
    for cycle in range(2):
        for number_ in range(3):
            begin = 100_000 * (3 * cycle + number_)
            if on_gpu:
                # Streams are done with a step at other times; the second one begins it later.
                made.event("gpu_user_annotation", f"ProfilerStep#{number_}", begin, 60_000, tid=7)
                made.event(
                    "gpu_user_annotation", f"ProfilerStep#{number_}", begin + 70_000, 20_000, tid=9
                )
            else:
                made.step(number_, begin, 90_000)
            length = 1000 * (10 * cycle + number_ + 1)
            made.kernel(begin + 20_000, length, launched=None if on_gpu else begin + 10)
    found = split(read_trace(made.write(tmp_path / "rank0.json")), 0)
    assert [step.step.label for step in found.steps] == ["0", "1", "2", "0 #2", "1 #2", "2 #2"]
    expected = [1000, 2000, 3000, 11_000, 12_000, 13_000]
    assert [step.parts.compute_ns for step in found.steps] == expected
    assert all(step.parts.window_ns == 90_000 for step in found.steps)
    shown = traces.as_json(read_ranks([tmp_path]))["ranks"][0]["steps"]
    assert [(step["step"], step["occurrence"]) for step in shown[2:4]] == [(2, 1), (0, 2)]


def test_ranks_that_count_anew_are_compared(tmp_path):
    job = make_job(2, world=2, steps=6)
    for made in job.recordings.values():
        for event in made.events:
            if "ProfilerStep" in event["name"]:
                event["name"] = f"ProfilerStep#{int(event['name'].partition('#')[2]) % 3}"
    found = read_ranks([job.write(tmp_path / "job")])
    across = compare(found.ranks)
    assert across.refused == ""
    assert sum(len(one.match) for one in across.meetings) == len(job.met)
    assert {one.steps for one in across.lateness} == {6}


@pytest.mark.parametrize("lenient", [False, True])
def test_an_event_of_the_begin_of_one_and_the_end_of_another(lenient, tmp_path):
    made = Recording()
    for place in range(20):
        made.kernel(100 * place, 10 + place, launched=100 * place - 5)
    text = made.text()
    assert counts(read_trace(_written(tmp_path / "a.json", text), lenient=True)) == counts(
        read_trace(_written(tmp_path / "b.json", text))
    )
    # From within one event to the same place of the next but one.
    first = text.index(b'"dur": 0.012')
    last = text.index(b'"ts": ', text.index(b'"dur": 0.014'))
    joined = _written(tmp_path / "rank0.json", text[:first] + text[last:])
    assert counts(read_trace(joined, lenient=lenient)).get("joined_events", 0) == int(lenient)


def _written(path, text):
    path.write_bytes(text)
    return path


def test_sums_of_elements_do_not_overflow(tmp_path):
    made = Recording()
    made.step(1, 0, 10_000)
    for place, elements in enumerate((2**62, 2**62, 2**62, 5)):
        made.comm(
            100 * place, 50, ALL_REDUCE, launched=place,
            **{"In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float"},
        )  # fmt: skip
    found = split(read_trace(made.write(tmp_path / "rank0.json")), 0)
    (share,) = found.total.by_kind
    assert (share.count, share.elements) == (4, None)
    made.events[-1]["args"] |= {"In msg nelems": 2**40, "Out msg nelems": 2**40}
    for event in made.events[-7:-1:2]:
        event["args"] |= {"In msg nelems": 2**40, "Out msg nelems": 2**40}
    found = split(read_trace(made.write(tmp_path / "rank0.json")), 0)
    assert found.total.by_kind[0].elements == 4 * 2**40


def test_shifts_that_fit_are_all_found_and_ends_tell_which_one_is_right():
    """Against the definition, on sequences that mostly repeat."""
    from ddp_profiler.trace.matching import Calls, fits

    draw = np.random.default_rng(3)

    def calls(elements, end_ns):
        size = len(elements)
        none = np.zeros(size, np.int64)
        return Calls(
            np.arange(size), none, np.array(elements), none, np.array(end_ns), None, none > 0
        )

    for missing in (0, 3, 10):
        elements = np.tile([5, 7], 60)
        end_ns = np.cumsum(draw.integers(1000, 9000, 120))
        one = calls(elements, end_ns)
        other = calls(elements[missing:], end_ns[missing:] + 77)
        shifts = _fitting_shifts(one, other)
        expected = []
        for shift in range(-119, 120):
            first = np.arange(max(0, -shift), min(len(one), len(other) - shift))
            if first.size >= (len(other) + 1) // 2 and (
                fits(one.take(first), other.take(first + shift)).all()
            ):
                expected.append(shift)
        assert sorted(shifts) == expected
        assert len(expected) > 50
        apart = {shift: _scatter_ns(one, other, shift) for shift in shifts}
        assert min(apart, key=apart.get) == -missing
        assert apart[-missing] == 0
