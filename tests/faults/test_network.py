"""A link that is slow all at once is a result; one that goes down ends both sides.

The link that goes down is in tests/lab/test_faults.py.
"""

import json

import pytest

from tests.lab.conftest import ROOT, lab_tool, usable

pytestmark = pytest.mark.lab

__all__ = ["usable"]


def test_a_link_at_a_hundredth_of_its_rate_is_a_result(usable, tmp_path):
    folder = tmp_path / "run"
    options = (
        *("-m", "ddp_profiler.run", "--model", "timed:layers=2,parameters=20000"),
        *("--dp", "2", "--steps", "12", "--warmup", "2", "--threads-per-rank", "1"),
        *("--allreduce-max-mb", "0.1", "--timeout", "10", "--out", str(folder)),
    )
    slowed = []
    with lab_tool.Lab(nodes=2) as lab:

        def follow(node, stream, line):
            if line.startswith("[1/1] dp2") and not slowed:
                slowed.append(lab.rates_mbit[1] / 100)
                lab.set_rate(1, slowed[0])

        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        results = lab.run_torchrun(options, timeout=150, env=env, echo=follow)
    assert slowed
    assert [r.returncode for r in results] == [0, 0], results[0].stderr[-3000:]
    info = json.loads((folder / "run.json").read_text())
    assert (info["status"], info["failures"]) == ("complete", [])
    level = json.loads((folder / "summary.json").read_text())["levels"][0]
    # 160 kB a step at 10 Mbit/s: each rank sends and receives it in an eighth of a second.
    assert level["breakdown_ms"]["exposed_transfer"] > 20
    assert level["allreduce"]["sizes"][-1]["busbw_gb_per_s"] < 0.005
