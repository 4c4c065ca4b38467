"""``ddp-profiler predict``: table, JSON and errors."""

import json
from dataclasses import replace

import pytest

from ddp_profiler import cli, load
from ddp_profiler.analysis.parts import PARTS
from tests.unit.study_levels import level, summary


@pytest.fixture
def study(monkeypatch):
    def use(*levels, **settings):
        monkeypatch.setattr(load, "load_summary", lambda _: summary(*levels, **settings))

    use(level(1), level(2), level(4))
    return use


def call(capfd, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["predict", *arguments])
    out, err = capfd.readouterr()
    return ended.value.code, out, err


def test_json_has_the_keys_of_the_contract(study, capfd):
    code, out, err = call(capfd, "RUN", "--dp", "8,16", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert set(found) >= {"predictions", "backtest", "model"}
    first = found["predictions"][0]
    assert [one["dp"] for one in found["predictions"]] == [8, 16]
    assert set(first["step_ms"]) == {"median", "interval90"}
    assert set(first["breakdown_ms"]) == set(PARTS)
    assert first["efficiency"] < 1
    test = found["backtest"][0]
    assert set(test) >= {"held_out", "predicted_ms", "measured_ms", "error_pct"}
    assert found["backtest_not_possible"] is None
    assert found["model"]["networks"][0]["form"] == "ring"


def test_table_fits_and_says_how_far_to_trust_it(study, capfd):
    code, out, _ = call(capfd, "RUN", "--dp", "2,8,64")
    assert code == 0
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "Back-test: each measured level predicted from the others." in out
    assert "dp4-acc1" in out
    # What goes beyond what was measured is marked, with the reason.
    assert "64*" in out
    assert "More ranks than were measured" in out
    assert " 2*" not in out


def test_two_levels_leave_no_back_test(study, capfd):
    study(level(1), level(2))
    code, out, _ = call(capfd, "RUN", "--dp", "4")
    assert code == 0
    assert "Back-test: not possible" in out
    assert "ring from a tree" in " ".join(out.split())


def test_options_reach_the_prediction(study, capfd):
    def step(*options):
        _, out, _ = call(capfd, "RUN", "--dp", "4", "--json", *options)
        return json.loads(out)["predictions"][0]["step_ms"]["median"]

    steps = [
        step(),
        step("--bandwidth-gbps", "0.5"),
        step("--bucket-cap-mb", "4"),
        step("--accumulate", "4"),
        step("--gradient-dtype", "bf16"),
    ]
    assert len({round(value, 1) for value in steps}) == 5
    assert steps[1] > steps[0] > steps[2]


def test_ranks_per_node(study, capfd):
    study(level(1, nodes=1), level(2, nodes=1), level(4, nodes=1), per_node=4)
    code, _, err = call(capfd, "RUN", "--dp", "8")
    assert code == 2
    assert "--bandwidth-gbps" in err
    code, out, _ = call(capfd, "RUN", "--dp", "8", "--ranks-per-node", "8", "--json")
    assert (code, json.loads(out)["predictions"][0]["nodes"]) == (0, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--dp", "x"),
        ("--dp", "0"),
        ("--dp", "4", "--bandwidth-gbps", "0"),
        ("--dp", "4", "--bandwidth-gbps", "nan"),
        ("--dp", "4", "--bucket-cap-mb", "-1"),
        ("--dp", "4", "--accumulate", "0"),
        ("--dp", "4", "--gradient-dtype", "int8"),
        ("--dp", "4", "--ranks-per-node", "0"),
        ("--dp", "100000"),
    ],
)
def test_wrong_usage_exits_with_2(study, capfd, arguments):
    code, out, err = call(capfd, "RUN", *arguments)
    assert (code, out) == (2, "")
    assert 1 <= len(err.strip().splitlines()) <= 2
    assert "Traceback" not in err


def test_a_run_that_carries_no_prediction_exits_with_3(study, capfd):
    study(level(1))
    code, out, err = call(capfd, "RUN", "--dp", "4")
    assert (code, out) == (3, "")
    assert "nothing of the network" in err


def test_a_partial_run_is_marked(study, capfd, monkeypatch):
    whole = summary(level(1), level(2))
    cut = replace(whole, run=replace(whole.run, partial=True))
    monkeypatch.setattr(load, "load_summary", lambda _: cut)
    _, out, _ = call(capfd, "RUN", "--dp", "4")
    assert "which is PARTIAL" in out.replace("\n", " ")
    _, out, _ = call(capfd, "RUN", "--dp", "4", "--json")
    assert json.loads(out)["partial"] is True


def test_a_run_whose_rank_is_missing_says_so(study, capfd, monkeypatch):
    whole = summary(level(1))
    notes = ("The record of rank 1 is missing.",)
    lost = replace(whole, run=replace(whole.run, partial=True), notes=notes)
    monkeypatch.setattr(load, "load_summary", lambda _: lost)
    code, _, err = call(capfd, "RUN", "--dp", "4")
    assert code == 3
    assert "The record of rank 1 is missing." in err
