"""Mistakes of reduction, each planted in a script of its own and found; without it, nothing is."""

import pytest

from tests.integration.conftest import OF_THE_MACHINE, serious
from tests.integration.test_scripts import SCRIPTS, observe

pytestmark = pytest.mark.distributed

WRONG = {
    "needless:never": [("needless-reductions", "warning")],
    "needless:backward_only": [("needless-reductions", "warning")],
    "needless:wrong_object": [("needless-reductions", "warning")],
    "unreduced:no_sync": [("never-reduced", "error")],
    "unreduced:past_ddp": [("never-reduced", "error")],
    "unreduced:past_ddp_equal": [("never-reduced", "error")],
    "unreduced:past_one_of_two": [("gradients-differ", "error")],
    "unreduced:inverted": [("gradients-differ", "error")],
    "unreduced:outside": [("gradients-differ", "error")],
    "unreduced:frozen": [("gradients-differ", "error")],
    "unreduced:changed": [("gradients-differ", "error")],
    "unused:wrong": [("needless-unused-search", "warning")],
    "buffers:wrong": [("needless-buffer-broadcast", "warning")],
    "compiled:wrong": [("compiled-inside-ddp", "warning")],
}
RIGHT = (
    "needless:right",
    "unreduced:right",
    "unreduced:sharded",
    "unreduced:by_hand",
    "unused:right",
    "unused:needed",
    "buffers:right",
    "buffers:norm",
    "buffers:late",
    "compiled:split",
    "compiled:right",
)
SAID = {
    "unreduced:no_sync": ("under no_sync()", "8 of 8 parameters differ"),
    "unreduced:past_ddp": ("called past DDP", "8 of 8 parameters differ"),
    "unreduced:past_ddp_equal": ("called past DDP", "all 8 parameters are equal nevertheless"),
    "unreduced:past_one_of_two": ("1.0.weight, ", "4 of 8 compared"),
    "unreduced:inverted": ("after the last reduction", "8 of 8 compared"),
    "unreduced:outside": ("group 0 parameter 8 (256x256), ", "2 of 10 compared"),
    "unreduced:frozen": ("of 0.weight, 0.bias: frozen when", "2 of 8 compared"),
    "unreduced:changed": ("of 2.weight: they differ though", "1 of 8 compared"),
    "buffers:wrong": ("broadcast_buffers=False", "4.2 MB of buffers"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The summaries of all scripts, by script and way."""
    folder = tmp_path_factory.mktemp("mistakes")
    summaries = {}
    for case in [*WRONG, *RIGHT]:
        script, _, way = case.partition(":")
        argv = ("--warmup", 3, SCRIPTS / "mistakes" / f"{script}.py", way)
        run = observe(folder / f"{script}-{way}", 2, *argv)
        assert run.code == 0, run.err[-3000:]
        assert "has failed" not in run.err, run.err
        summaries[case] = run.summary
    return summaries


@pytest.mark.parametrize("case", WRONG)
def test_a_planted_mistake_is_found(runs, case):
    found = serious(runs[case])
    # What costs time is a warning where it costs enough of the step, which depends on the machine.
    costs = [
        f
        for f in runs[case]["findings"]
        if f["id"] in ("needless-unused-search", "needless-buffer-broadcast", "compiled-inside-ddp")
    ]
    assert [(f["id"], f["severity"]) for f in found] == WRONG[case] or (
        not found and [f["id"] for f in costs] == [name for name, _ in WRONG[case]]
    )
    message, evidence = SAID.get(case, ("", ""))
    one = (found or costs)[0]
    assert message in one["message"]
    assert evidence in one["evidence"]
    agree = WRONG[case][0][0] != "gradients-differ" and case not in (
        "unreduced:no_sync",
        "unreduced:past_ddp",
    )
    assert runs[case]["levels"][0]["batch_check"]["ranks_agree"] is agree


@pytest.mark.parametrize("case", RIGHT)
def test_without_it_there_is_no_finding(runs, case):
    assert serious(runs[case]) == []
    ids = {f["id"] for f in runs[case]["findings"]}
    # Neither is about a mistake: the largest part, and the gradient noise scale.
    assert ids - OF_THE_MACHINE <= {"limit", "noise-scale"}
    assert runs[case]["levels"][0]["batch_check"]["ranks_agree"] is True


@pytest.mark.parametrize("way", ["never", "backward_only", "wrong_object"])
def test_needless_reductions_are_counted(runs, way):
    reduction = runs[f"needless:{way}"]["levels"][0]["reduction"]
    assert reduction["syncs"] == 4
    # Of each of the first three micro-steps: all gradients.
    assert reduction["needless_bytes"] == 3 * 12 * 4 * (256 * 256 + 256)
    assert reduction["needless_ms"] >= 0
    assert runs["needless:right"]["levels"][0]["reduction"]["syncs"] == 1


def test_costs_are_measured(runs):
    def of(case):
        return runs[case]["levels"][0]["reduction"]

    assert of("unused:wrong")["search_ms"] > 0
    assert of("unused:wrong")["unused"] == 0
    assert of("unused:needed")["unused"] == 2
    assert (of("unused:right")["search_ms"], of("unused:right")["unused"]) == (0, None)
    (table,) = of("buffers:wrong")["broadcasts"]
    assert (table["nbytes"], table["changed"]) == (4 * 4096 * 256, False)
    assert table["mean_ms"] >= table["least_ms"] > 0
    assert table["compared_steps"] == [1, 9]
    assert [b["changed"] for b in of("buffers:norm")["broadcasts"]] == [True]
    assert [b["changed"] for b in of("buffers:late")["broadcasts"]] == [True]
    assert of("buffers:right")["broadcasts"] == []
    assert of("compiled:wrong")["first_hand_over_fraction"] > 0.5
    assert of("compiled:split")["compiled_inside"]
    assert not of("compiled:right")["compiled_inside"]
