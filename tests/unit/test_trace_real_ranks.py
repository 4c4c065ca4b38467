"""Real traces of several ranks: who joined last, and what must not change it."""

import gzip
import json
import os
from pathlib import Path

import pytest

from ddp_profiler.report import traces
from ddp_profiler.trace.analysis import analyse
from ddp_profiler.trace.gather import read_ranks
from ddp_profiler.trace.timeline import write_timeline

FOLDER = Path(
    os.environ.get("DDP_PROFILER_TRACES")
    or Path(__file__).resolve().parents[2].parent / "shared" / "traces"
)

pytestmark = pytest.mark.skipif(
    not (FOLDER / "INDEX.md").is_file(),
    reason=f"no real traces in {FOLDER}; DDP_PROFILER_TRACES names another folder",
)


def content_of(paths):
    found = read_ranks(paths)
    analysis = analyse(found)
    return found, analysis, json.loads(json.dumps(traces.as_json(found, analysis)))


@pytest.fixture(scope="module")
def dlrm():
    return content_of([FOLDER / "dlrm_8_ranks"])


def of_kind(content, kind):
    return [row for row in content["collectives"] if row["kind"] == kind]


def test_dlrm_all_reduces(dlrm):
    _, analysis, content = dlrm
    rows = of_kind(content, "AllReduce")
    assert [list(row["duration_us_by_rank"].values()) for row in rows] == [
        [246, 307, 198, 291, 95, 96, 213, 86],
        [601, 601, 572, 602, 70, 20, 602, 468],
        [952, 922, 915, 879, 69, 79, 920, 803],
    ]
    assert [row["last_rank"] for row in rows] == [7, 5, 4]
    assert [row["index"] for row in rows] == [0, 1, 2]
    # From the begin of the last to join: its own duration.
    assert [row["transfer_us"] for row in rows] == [86, 20, 69]
    # One host clock: ends agree within 7 us, and so do the offsets.
    assert analysis.across.refused == ""
    assert max(abs(us) for us in content["clock_offsets_us"].values()) <= 3
    assert content["clock_residual_us"] <= 7
    for row in rows:
        waits = row["wait_us_by_rank"]
        assert waits[str(row["last_rank"])] == 0
        for rank, duration in row["duration_us_by_rank"].items():
            assert waits[rank] + row["transfer_us"] == pytest.approx(duration, abs=7)


def test_dlrm_messages(dlrm):
    _, analysis, content = dlrm
    rows = of_kind(content, "SendRecv")
    assert len(rows) == 5
    first = rows[0]
    assert (first["duration_us_by_rank"]["7"], first["duration_us_by_rank"]["1"]) == (10, 7635)
    assert first["last_rank"] == 7
    assert first["wait_us_by_rank"]["1"] == pytest.approx(7625, abs=7)
    assert content["clock_collectives"] == 3
    assert analysis.across.lateness[0].rank == 7
    assert analysis.across.lateness[0].last == 5
    late = next(one for one in content["findings"] if one["id"] == "late-rank")
    assert late["message"].startswith("Rank 7 ")


def test_dlrm_table(dlrm):
    found, analysis, _ = dlrm
    text = traces.render(found, analysis)
    assert max(map(len, text.splitlines())) <= 80
    assert "8 collectives matched, 5 of them SendRecv" in text.replace("\n", " ")


def copied(folder, change):
    """The traces with one changed: ``change`` takes the rank and the content."""
    folder.mkdir()
    for file in sorted((FOLDER / "dlrm_8_ranks").iterdir()):
        with gzip.open(file) as opened:
            content = json.load(opened)
        change(content["distributedInfo"]["rank"], content)
        (folder / file.name.removesuffix(".gz")).write_text(json.dumps(content))
    return folder


def without_files(rank):
    return {key: value for key, value in rank.items() if key != "file"}


def test_shifting_rank_3_changes_only_its_offset(dlrm, tmp_path):
    def shift(rank, content):
        for event in content["traceEvents"] if rank == 3 else ():
            if "ts" in event and event.get("ph") != "M":
                event["ts"] += 11_560_000

    found, analysis, moved = content_of([copied(tmp_path / "job", shift)])
    base = dlrm[2]
    offset = moved["clock_offsets_us"]["3"]
    assert offset == base["clock_offsets_us"]["3"] + 11_560_000
    moved["clock_offsets_us"]["3"] -= 11_560_000
    for name in set(base) - {"ranks"}:
        assert moved[name] == base[name], name
    for before, after in zip(base["ranks"], moved["ranks"], strict=True):
        assert before["total"] == after["total"]
        if before["rank"] != 3:
            assert without_files(before) == without_files(after)
    for folder, ranks, across in (
        ("a.json", dlrm[0].ranks, dlrm[1].across),
        ("b.json", found.ranks, analysis.across),
    ):
        write_timeline(tmp_path / folder, ranks, across)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_lower_case_kernels_change_nothing(dlrm, tmp_path):
    def lower(rank, content):
        for event in content["traceEvents"]:
            if event.get("cat") == "kernel":
                event["name"] = event["name"].lower()

    _, _, lowered = content_of([copied(tmp_path / "job", lower)])
    base = dlrm[2]
    for name in set(base) - {"ranks"}:
        assert lowered[name] == base[name], name
    assert list(map(without_files, lowered["ranks"])) == list(map(without_files, base["ranks"]))


def test_one_kernel_of_10_s_is_flagged_and_moves_nothing_else(dlrm, tmp_path):
    def stretch(rank, content):
        if rank == 3:
            found = [
                e for e in content["traceEvents"]
                if e.get("cat") == "kernel" and "AllReduce" in e["name"]
            ]  # fmt: skip
            sorted(found, key=lambda event: event["ts"])[1]["dur"] = 10_000_000

    _, _, broken = content_of([copied(tmp_path / "job", stretch)])
    codes = {warning["code"]: warning["count"] for warning in broken["warnings"]}
    assert (codes["ends_apart"], codes["stretched_kernel"]) == (1, 1)
    assert broken["clock_residual_us"] <= 7
    for rank, us in dlrm[2]["clock_offsets_us"].items():
        assert broken["clock_offsets_us"][rank] == pytest.approx(us, abs=3)
    rows = of_kind(broken, "AllReduce")
    assert [row["last_rank"] for row in rows] == [7, None, 4]
    assert [row["transfer_us"] for row in rows] == [86, None, 69]
    assert "late-rank" in {one["id"] for one in broken["findings"]}


def test_one_missing_rank(tmp_path):
    files = sorted((FOLDER / "dlrm_8_ranks").iterdir())
    _, _, content = content_of([file for file in files if "worker7" not in file.name])
    assert {w["code"] for w in content["warnings"]} >= {"missing_ranks"}
    assert "7" not in content["clock_offsets_us"]
    # Of the ranks given another one was last at the first.
    rows = of_kind(content, "AllReduce")
    assert [row["last_rank"] for row in rows][1:] == [5, 4]
    assert "7" not in rows[0]["wait_us_by_rank"]
    assert "ranks-missing" in {one["id"] for one in content["findings"]}


def test_resnet50_reduces_its_parameters():
    _, analysis, content = content_of([FOLDER / "resnet50_ddp_rank0_of_2.json.gz"])
    steps = content["gradients"][0]["steps"]
    assert [(s["step"], s["reductions"], s["elements"], s["bytes"]) for s in steps] == [
        (step, 5, 25_557_032, 102_228_128) for step in (4, 5, 6)
    ]
    assert [one["group_size"] for one in content["bandwidth"]] == [2, 2]
    assert {one["busbw_gb_per_s"] for one in content["bandwidth"]} == {None}
    assert analysis.across.refused
    rows = of_kind(content, "AllReduce")
    assert len(rows) == 15
    assert {row["wait_us_by_rank"] for row in rows} == {None}
    assert content["clock_offsets_us"] is None


def test_gloo_alone_needs_no_clocks():
    _, _, content = content_of([FOLDER / "gloo_rank34_of_300.json.gz"])
    assert len(content["collectives"]) == 10
    assert content["clock_offsets_us"] is None
