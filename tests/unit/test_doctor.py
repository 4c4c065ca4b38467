"""The doctor: facts are planted, verdicts are read; no check hangs, and torch may be broken."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from ddp_profiler.cli import main
from ddp_profiler.doctor import (
    combinations,
    examination,
    gpus,
    host,
    network,
    software,
    text,
    variables,
)
from ddp_profiler.doctor.combinations import Setting
from ddp_profiler.doctor.gpus import Gpu, GpuFacts, Pair
from ddp_profiler.doctor.host import ClockFacts, CoreFacts, DiskFacts, LimitFacts
from ddp_profiler.doctor.network import (
    Choice,
    LinkState,
    NameFacts,
    NetworkFacts,
    PortFacts,
    RdmaPort,
)
from ddp_profiler.doctor.reading import Reader, Unread, read_all
from ddp_profiler.doctor.software import Software, TorchFacts, Wheel
from ddp_profiler.measure import torch_probe
from ddp_profiler.measure.interfaces import Interface

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"
WHEEL = Wheel("nvidia-nccl-cu13", "2.29.7", LIBRARY)
TORCH = TorchFacts(
    version="2.13.0+cu130",
    cuda="13.0",
    distributed=True,
    backends=("gloo", "nccl"),
    cuda_available=True,
    device_count=2,
    architectures=("sm_80", "sm_90", "compute_90"),
    nccl_built="2.29.7",
    nccl_loaded="2.29.7",
    nccl_path=LIBRARY,
)
CPU = TorchFacts(version="2.13.0+cpu", distributed=True, backends=("gloo",))
WANTED = ">=2.11,<2.15"
LO = Interface("lo", ("127.0.0.1",))
ETH = Interface("eth0", ("192.0.2.1",))
CORES = CoreFacts(8, 8, tuple(range(8)), None, 1, None)
CLOCK = ClockFacts("tsc", ("tsc", "hpet"), 1.0, 40.0, True, 0.5)
DISK = DiskFacts("runs", "/home/me/runs", True, 50_000_000_000, None, "ext4")
LIMITS = LimitFacts(None, 65536, 65536, 64_000_000_000, 64_000_000_000)
NAMES = NameFacts("node0", ("192.0.2.1",), 0.01, ("127.0.0.1", "192.0.2.1"))
PORTS = PortFacts(True, 40000)
NETWORK = NetworkFacts(
    (LO, ETH),
    {"lo": LinkState(True, 0, 65536), "eth0": LinkState(True, 25_000, 9000)},
    Choice(("eth0",), ("192.0.2.1",), "hostname"),
    Choice(("eth0",), ("192.0.2.1",), "NCCL's own order"),
)


def h100(index, **changes):
    gpu = Gpu(
        index,
        "NVIDIA H100 80GB HBM3",
        memory_bytes=85_000_000_000,
        capability="9.0",
        readings={
            "pcie_generation": 5,
            "pcie_generation_max": 5,
            "pcie_width": 16,
            "pcie_width_max": 16,
        },
        nvlinks=(True,) * 18,
    )
    return dataclasses.replace(gpu, **changes)


def cards(*of, **changes):
    of = of or (h100(0), h100(1))
    pairs = (Pair(0, 1, "NVLink", True),) if len(of) == 2 else ()
    facts = GpuFacts(("NVIDIA",) * len(of), "ok", "580.65.06", "13.0", of, pairs, (0,))
    return dataclasses.replace(facts, **changes)


def good_facts(**changes):
    return {
        "software": Software(TORCH, WANTED, (WHEEL,)),
        "gpus": cards(),
        "network": NETWORK,
        "names": NAMES,
        "ports": PORTS,
        "cores": CORES,
        "clock": CLOCK,
        "disk": DISK,
        "limits": LIMITS,
        **changes,
    }


def only(verdicts, id):
    found = [v for v in verdicts if v.id == id]
    assert len(found) == 1, verdicts
    return found[0]


def statuses(verdicts):
    return {v.id: v.status for v in verdicts}


def replace(facts, **changes):
    return dataclasses.replace(facts, **changes)


# torch and NCCL


def judge_torch(wanted=WANTED, **changes):
    return software.judge_torch(Software(replace(TORCH, **changes), wanted, ()))


def test_torch():
    assert statuses(judge_torch()) == {"torch": "ok"}
    assert statuses(judge_torch(version="2.10.0")) == {"torch": "warning"}
    assert statuses(judge_torch(version="2.15.1")) == {"torch": "warning"}
    assert "pip install 'torch>=2.11,<2.15'" in judge_torch(version="2.10.0")[0].remedy
    # A local version is the same version.
    assert statuses(judge_torch(version="2.11.0+cu128")) == {"torch": "ok"}
    assert "not known" in judge_torch(wanted=None)[0].message
    without = judge_torch(distributed=False, backends=())
    assert statuses(without) == {"torch": "ok", "torch-distributed": "error"}


def test_torch_that_cannot_be_used():
    missing = software.judge_torch(Software(TorchFacts(installed=False), WANTED, ()))
    assert [(v.status, v.message) for v in missing] == [("error", "torch is not installed.")]
    broken = software.judge_torch(Software(TorchFacts(problem="OSError: libx.so"), WANTED, ()))
    assert broken[0].status == "error"
    assert "libx.so" in broken[0].message


def judge_nccl(wheels=(WHEEL,), **changes):
    return software.judge_nccl(Software(replace(TORCH, **changes), WANTED, wheels))


def test_nccl():
    good = judge_nccl()
    assert statuses(good) == {"nccl": "ok", "nccl-wheels": "ok"}
    assert "2.29.7" in good[0].message
    assert LIBRARY in good[0].message
    assert statuses(judge_nccl(cuda=None, version="2.13.0+cpu")) == {"nccl": "not applicable"}
    assert statuses(judge_nccl(hip="6.4", cuda=None)) == {"nccl": "not applicable"}
    assert statuses(judge_nccl(backends=("gloo",))) == {"nccl": "warning"}
    assert (
        judge_nccl(nccl_loaded=None, nccl_path=None)[0].message == "NCCL 2.29.7, linked into torch."
    )


def test_nccl_older_than_compiled():
    found = only(judge_nccl(wheels=(), nccl_loaded="2.27.3", nccl_path="/opt/libnccl.so.2"), "nccl")
    assert found.status == "warning"
    assert "/opt/libnccl.so.2" in found.message
    assert "LD_LIBRARY_PATH" in found.remedy
    # A newer one is compatible.
    assert judge_nccl(wheels=(), nccl_loaded="2.30.0")[0].status == "ok"


def test_two_wheels_of_nccl():
    other = Wheel("nvidia-nccl-cu12", "2.29.3", LIBRARY)
    found = only(judge_nccl(wheels=(other, WHEEL)), "nccl-wheels")
    assert found.status == "warning"
    assert "nvidia-nccl-cu12 2.29.3 and nvidia-nccl-cu13 2.29.7" in found.message
    assert "reinstall nvidia-nccl-cu13" in found.remedy
    assert found.source == software.TWO_WHEELS


def test_wheel_of_another_cuda():
    found = only(judge_nccl(wheels=(Wheel("nvidia-nccl-cu12", "2.29.7", LIBRARY),)), "nccl-wheels")
    assert found.status == "warning"
    assert "install nvidia-nccl-cu13" in found.remedy


def test_wheel_that_is_not_loaded():
    elsewhere = only(
        judge_nccl(nccl_loaded="2.30.1", nccl_path="/usr/lib/libnccl.so.2"), "nccl-wheels"
    )
    assert elsewhere.status == "warning"
    assert "another place (/usr/lib/libnccl.so.2)" in elsewhere.message
    same = only(judge_nccl(nccl_loaded="2.30.1"), "nccl-wheels")
    assert "its library says 2.30.1" in same.message
    assert "--force-reinstall" in same.remedy


def test_installed_wheels(tmp_path, monkeypatch):
    for name, version in (("nvidia_nccl_cu12", "2.29.3"), ("nvidia_nccl_cu13", "2.29.7")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")
    (tmp_path / "broken-1.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = software.read_software(limit_s=60).nccl_wheels
    assert [(w.name, w.version) for w in found] == [
        ("nvidia-nccl-cu12", "2.29.3"),
        ("nvidia-nccl-cu13", "2.29.7"),
    ]
    assert found[0].library == found[1].library == str(tmp_path / "nvidia/nccl/lib/libnccl.so.2")


def test_loaded_library():
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 12 /venv/torch/lib/libtorch_cuda.so\n"
        f"7f02-7f03 r-xp 00000000 08:01 13                         {LIBRARY}\n"
        "7f04-7f05 r-xp 00000000 08:01 14 /usr/lib/libnccl-net.so\n"
        "7f06-7f07 rw-p 00000000 00:00 0 [heap]\n"
    )
    assert torch_probe.loaded_library(maps) == LIBRARY
    assert torch_probe.loaded_library("7f00-7f01 r-xp 0 08:01 12 /x/libnccl-net.so\n") is None


def test_loaded_nccl_is_asked(tmp_path):
    """A library that says its version, as NCCL does."""
    source = tmp_path / "nccl.c"
    source.write_text("int ncclGetVersion(int *v) { *v = 22907; return 0; }\n")
    built = tmp_path / "libnccl.so.2"
    command = ["cc", "-shared", "-fPIC", "-o", str(built), str(source)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler")
    assert torch_probe.ask_nccl(str(built)) == "2.29.7"
    assert torch_probe.ask_nccl(None) is None


def shadow(tmp_path, code):
    """A folder in which a module torch does something."""
    (tmp_path / "torch.py").write_text(code)
    return tmp_path


def ask(folder, limit_s=20.0):
    command = (
        sys.executable,
        "-P",
        "-c",
        f"import sys; sys.path.insert(0, {str(folder)!r}); sys.argv = ['probe']; "
        f"import runpy; runpy.run_path({torch_probe.__file__!r}, run_name='__main__')",
    )
    return software.ask_torch(command, limit_s)


def test_torch_of_all_kinds(tmp_path):
    cases = {
        "raise ModuleNotFoundError('no torch', name='torch')": ("installed", False),
        "raise ModuleNotFoundError('no sympy', name='sympy')": ("problem", "no sympy"),
        "raise OSError('libcudart.so.13: cannot open')": ("problem", "libcudart.so.13"),
        "raise SystemExit(3)": ("problem", "SystemExit"),
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": ("problem", "SIGSEGV"),
        "import os; os._exit(7)": ("problem", "ended with 7"),
    }
    for number, (code, (field, expected)) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = getattr(ask(shadow(folder, code)), field)
        assert found is expected if isinstance(expected, bool) else expected in found, code


def test_torch_that_hangs(tmp_path):
    begun = time.monotonic()
    found = ask(shadow(tmp_path, "import time; time.sleep(60)"), limit_s=1.0)
    assert found.problem == "the import did not end within 1 s"
    assert time.monotonic() - begun < 20


def test_torch_that_aborts_after_it_answered(tmp_path):
    code = (
        "import atexit, os\n"
        "atexit.register(os.abort)\n"
        "print('a library says hello')\n"
        "__version__ = '2.13.0'\n"
        "class version: cuda = None; hip = None\n"
    )
    found = ask(shadow(tmp_path, code))
    assert found.problem is None
    assert found.version == "2.13.0"


def test_the_real_torch():
    import torch

    found = software.ask_torch()
    assert found.problem is None
    assert found.version == str(torch.__version__)
    assert found.device_count == torch.cuda.device_count()
    assert "gloo" in found.backends


# GPUs and links


def judge_gpus(facts, torch=TORCH):
    return gpus.judge_gpus(facts, torch)


def judge_links(facts, torch=TORCH):
    return gpus.judge_links(facts, torch)


def test_gpus():
    good = judge_gpus(cards())
    assert statuses(good) == {"driver": "ok", "gpus": "ok", "gpu-use": "ok"}
    assert only(good, "gpus").message == "2 x NVIDIA H100 80GB HBM3, 85.0 GB."
    assert statuses(judge_links(cards())) == {"nvlink": "ok", "pcie": "ok", "gpu-paths": "ok"}


def test_no_gpu():
    for torch in (CPU, None):
        assert statuses(judge_gpus(GpuFacts(library="no driver"), torch)) == {
            "gpus": "not applicable"
        }
    assert statuses(judge_links(GpuFacts())) == {"gpu-links": "not applicable"}
    amd = judge_gpus(GpuFacts(("AMD",), library="nvidia-ml-py is not installed"), CPU)
    assert statuses(amd) == {"gpus": "not applicable"}


def test_gpus_that_cannot_be_asked():
    no_library = GpuFacts(("NVIDIA", "NVIDIA"), library="nvidia-ml-py is not installed")
    found = only(judge_gpus(no_library), "gpus")
    assert (found.status, found.remedy) == ("warning", "pip install 'ddp-profiler[gpu]'")
    no_driver = only(judge_gpus(GpuFacts(("NVIDIA",), library="Driver Not Loaded")), "gpus")
    assert no_driver.status == "warning"
    assert "Driver Not Loaded" in no_driver.message


def test_driver_too_old():
    for driver, cuda, status in (
        ("570.133.20", "13.0", "warning"),
        ("580.65.06", "13.2", "ok"),
        ("525.60.13", "12.8", "ok"),
        ("470.82", "12.8", "warning"),
        ("470.82", None, "ok"),
    ):
        found = only(judge_gpus(cards(driver=driver), replace(TORCH, cuda=cuda)), "driver")
        assert found.status == status, (driver, cuda)


def test_gpus_that_torch_does_not_see():
    cpu = only(judge_gpus(cards(), CPU), "gpu-use")
    assert (cpu.status, "not built for CUDA" in cpu.message) == ("warning", True)
    blind = replace(TORCH, cuda_available=False, device_count=0, cuda_problem="driver too old")
    found = only(judge_gpus(cards(), blind), "gpu-use")
    assert (found.status, "driver too old" in found.message) == ("warning", True)


def test_architecture_that_torch_has_no_code_for():
    def status(capability, architectures):
        torch = replace(TORCH, architectures=architectures)
        found = judge_gpus(cards(h100(0, capability=capability)), torch)
        return statuses(found).get("gpu-architecture")

    assert status("7.0", ("sm_80", "sm_90")) == "error"
    assert status("8.6", ("sm_80", "sm_90")) is None
    assert status("8.0", ("sm_86",)) == "error"
    assert status("12.0", ("sm_80", "sm_90a")) == "error"
    assert status("12.0", ("sm_80", "compute_90")) is None
    assert status("9.0", ()) is None


@pytest.mark.parametrize(
    ("changes", "id", "status", "word"),
    [
        ({"name": "NVIDIA A100"}, "gpus", "warning", "differ"),
        ({"processes": 2, "used_bytes": 30e9}, "gpu-busy", "warning", "30.0 GB"),
        ({"exclusive": "prohibited"}, "gpu-mode", "error", "PROHIBITED"),
        ({"mig": True}, "gpu-mig", "warning", "MIG"),
        ({"uncorrected_errors": 3}, "gpu-memory", "warning", "3 memory errors"),
        ({"numa_node": 1}, "gpu-numa", "warning", "node 1"),
        ({"readings": {"reasons": 0x40 | 0x4}}, "gpu-clocks", "warning", "hardware thermal"),
    ],
)
def test_gpu_state(changes, id, status, word):
    assert only(judge_gpus(cards(h100(0), h100(1))), "gpus").status == "ok"
    found = only(judge_gpus(cards(h100(0), h100(1, **changes))), id)
    assert found.status == status
    assert word in found.message


def test_gpus_that_are_left_out():
    """What CUDA_VISIBLE_DEVICES leaves out is not judged; a slow pair between others neither."""
    bad = h100(1, uuid="GPU-b", exclusive="prohibited", capability="7.0", name="V100", nvlinks=())
    facts = cards(h100(0, uuid="GPU-a"), bad, h100(2, uuid="GPU-c"))
    facts = replace(facts, pairs=(Pair(0, 1, "SYS", False), Pair(0, 2, "NVLink", True)))
    all_of_them = judge_gpus(facts) + judge_links(facts)
    assert {"error", "warning"} <= set(statuses(all_of_them).values())
    some = replace(TORCH, uuids=("a", "c"))
    found = judge_gpus(facts, some) + judge_links(facts, some)
    assert set(statuses(found).values()) == {"ok"}
    assert only(found, "gpu-use").message == "torch sees 2 of 3 GPUs."
    # Instances of MIG have names of their own.
    assert judge_gpus(facts, replace(TORCH, uuids=("MIG-x",))) == judge_gpus(facts)


def test_idle_gpus_are_no_warning():
    """An idle GPU lowers its link, and its clock has a reason: that it is idle."""
    readings = {**h100(0).readings, "pcie_generation": 1, "reasons": 0x1}
    idle = cards(h100(0, readings=readings), h100(1, readings=readings))
    assert "gpu-clocks" not in statuses(judge_gpus(idle))
    found = only(judge_links(idle), "pcie")
    assert (found.status, "gen 1" in found.message) == ("ok", True)


def test_links():
    narrow = h100(1, readings={**h100(1).readings, "pcie_width": 8})
    found = only(judge_links(cards(h100(0), narrow)), "pcie")
    assert (found.status, found.message) == ("warning", "GPU 1 has PCIe gen 5 x8 of gen 5 x16.")
    weak = h100(1, nvlinks=(True,) * 17 + (False,))
    found = only(judge_links(cards(h100(0), weak)), "nvlink")
    assert (found.status, "GPU 1 17 of 18" in found.message) == ("warning", True)
    without = cards(h100(0, nvlinks=()), h100(1, nvlinks=()))
    assert only(judge_links(without), "nvlink").status == "not applicable"
    one = judge_links(cards(h100(0)))
    assert statuses(one) == {"nvlink": "ok", "pcie": "ok", "gpu-paths": "not applicable"}


def test_ways_between_gpus():
    def paths(*pairs):
        three = cards(h100(0), h100(1), h100(2), pairs=pairs)
        return only(judge_links(three), "gpu-paths")

    assert paths(Pair(0, 1, "PIX", True)).message == "1 pair through one PCIe switch."
    far = paths(Pair(0, 1, "SYS", True), Pair(0, 2, "NVLink", True), Pair(1, 2, "NVLink", True))
    assert far.status == "warning"
    assert far.message.startswith("2 pairs over NVLink, 1 pair between NUMA nodes.")
    blocked = paths(Pair(0, 1, "PHB", False))
    assert (blocked.status, "cannot read each other's memory" in blocked.message) == (
        "warning",
        True,
    )
    assert paths(Pair(0, 1, None, None)).status == "not applicable"


class NVMLError(Exception):
    pass


def fake_nvml(**changes):
    """Two GPUs joined by NVLink, of which one has a link that is down."""

    def of(first, second):
        return lambda handle, *_: {"a": first, "b": second}[handle]

    def nvlink(handle, link):
        if link >= 4:
            raise NVMLError("Invalid Argument")
        return 0 if (handle, link) == ("b", 3) else 1

    me = types.SimpleNamespace(pid=os.getpid())
    other = types.SimpleNamespace(pid=1)
    names = {
        "NVML_CLOCK_SM": 1,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_NVLINK_MAX_LINKS": 18,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: "ab"[index],
        "nvmlSystemGetDriverVersion": lambda: b"580.65.06",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13020,
        "nvmlDeviceGetUUID": of("GPU-a", b"GPU-b"),
        "nvmlDeviceGetName": of("NVIDIA H100", b"NVIDIA H100"),
        "nvmlDeviceGetMemoryInfo": of(*[types.SimpleNamespace(total=8e10, used=1e9)] * 2),
        "nvmlDeviceGetComputeRunningProcesses": of([me], [me, other]),
        "nvmlDeviceGetCudaComputeCapability": of((9, 0), (9, 0)),
        "nvmlDeviceGetComputeMode": of(0, 2),
        "nvmlDeviceGetMigMode": of((0, 0), (1, 1)),
        "nvmlDeviceGetPciInfo": of(
            types.SimpleNamespace(busId="00000000:4B:00.0"),
            types.SimpleNamespace(busId=b"00000000:CA:00.0"),
        ),
        "nvmlDeviceGetNvLinkState": nvlink,
        "nvmlDeviceGetTotalEccErrors": of(0, 5),
        "nvmlDeviceGetP2PStatus": lambda one, other, what: {0: 0, 2: 0}[what],
        "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: 50,
        "nvmlDeviceGetCurrPcieLinkWidth": of(16, 8),
        "nvmlDeviceGetMaxPcieLinkWidth": of(16, 16),
        **changes,
    }

    class Library:
        def __getattr__(self, name):
            if name.startswith("nvml") and name not in names:

                def missing(*_):
                    raise NVMLError("Function Not Found")

                return missing
            try:
                return names[name]
            except KeyError:
                raise AttributeError(name) from None

    return Library()


def test_reading_gpus(tmp_path):
    for bus, node in (("0000:4b:00.0", 0), ("0000:ca:00.0", 1)):
        folder = tmp_path / "sys/bus/pci/devices" / bus
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n")
        (folder / "numa_node").write_text(f"{node}\n")
    # Another device of the same vendor is no GPU.
    other = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    other.mkdir()
    (other / "vendor").write_text("0x10de\n")
    (other / "class").write_text("0x068000\n")
    found = gpus.read_gpus(fake_nvml(), tmp_path)
    assert found.on_bus == ("NVIDIA", "NVIDIA")
    assert (found.library, found.driver, found.cuda) == ("ok", "580.65.06", "13.2")
    assert [g.name for g in found.gpus] == ["NVIDIA H100"] * 2
    assert [g.uuid for g in found.gpus] == ["GPU-a", "GPU-b"]
    assert [g.numa_node for g in found.gpus] == [0, 1]
    assert [g.processes for g in found.gpus] == [0, 1]
    assert [g.nvlinks for g in found.gpus] == [(True,) * 4, (True, True, True, False)]
    assert [g.exclusive for g in found.gpus] == [None, "prohibited"]
    assert [g.mig for g in found.gpus] == [False, True]
    assert [g.uncorrected_errors for g in found.gpus] == [0, 5]
    assert found.pairs == (Pair(0, 1, "NVLink", True),)
    assert statuses(judge_links(found)) == {
        "nvlink": "warning",
        "pcie": "warning",
        "gpu-paths": "ok",
    }


def test_reading_gpus_of_a_driver_that_offers_little():
    def refuse(*_):
        raise NVMLError("Not Supported")

    given = {
        name: refuse
        for name in vars(fake_nvml)
        if name.startswith("nvml") and name not in ("nvmlInit",)
    }
    little = fake_nvml(
        **given,
        nvmlDeviceGetP2PStatus=refuse,
        nvmlDeviceGetTopologyCommonAncestor=refuse,
        nvmlDeviceGetMemoryInfo=refuse,
        nvmlDeviceGetNvLinkState=refuse,
        nvmlDeviceGetPciInfo=refuse,
        nvmlDeviceGetCudaComputeCapability=refuse,
        nvmlDeviceGetCurrPcieLinkWidth=refuse,
    )
    found = gpus.read_gpus(little)
    assert [g.memory_bytes for g in found.gpus] == [None, None]
    assert set(statuses(judge_links(found)).values()) == {"not applicable"}
    judge_gpus(found)


def test_driver_that_does_not_answer(tmp_path):
    def refuse():
        raise NVMLError("Driver Not Loaded")

    assert gpus.read_gpus(fake_nvml(nvmlInit=refuse), tmp_path).library == "Driver Not Loaded"


# network


def judge_network(nodes=None, nccl=True, **changes):
    return network.judge_network(replace(NETWORK, **changes), nodes, nccl=nccl)


def test_network():
    good = judge_network()
    assert statuses(good) == {
        "gloo-interface": "ok",
        "nccl-interface": "ok",
        "rdma": "not applicable",
    }
    assert "eth0 192.0.2.1, 25 Gbit/s, MTU 9000" in only(good, "gloo-interface").message
    assert only(judge_network(nccl=False), "nccl-interface").status == "not applicable"


def test_loopback_trap():
    loop = Choice(("lo",), ("127.0.1.1",), "hostname")
    for nodes, status in ((None, "warning"), (1, "ok"), (2, "error")):
        found = only(judge_network(nodes, gloo=loop), "gloo-interface")
        assert found.status == status
        assert nodes == 1 or "GLOO_SOCKET_IFNAME=eth0" in found.remedy


def test_interface_that_is_not_there():
    chosen = network.choose("gloo", {"GLOO_SOCKET_IFNAME": "ib7"}, (LO, ETH))
    found = only(judge_network(gloo=chosen), "gloo-interface")
    assert found.status == "error"
    assert "ib7" in found.message
    assert found.remedy == "Set GLOO_SOCKET_IFNAME=eth0, or unset it."


def test_interfaces_that_are_down_virtual_or_slow():
    docker = Interface("docker0", ("172.17.0.1",))
    slow = Interface("eno1", ("192.0.2.9",))
    interfaces = (LO, ETH, docker, slow)
    states = {
        **NETWORK.states,
        "docker0": LinkState(True, 10_000, 1500),
        "eno1": LinkState(True, 1000, 1500),
    }

    def judge(name, nodes=None, states=states):
        choice = Choice((name,), ("192.0.2.9",), "GLOO_SOCKET_IFNAME")
        found = judge_network(nodes, interfaces=interfaces, states=states, gloo=choice)
        return only(found, "gloo-interface")

    assert "bridge or tunnel" in judge("docker0").message
    assert judge("docker0", nodes=1).status == "ok"
    assert "eth0 is faster (25 Gbit/s)" in judge("eno1").message
    assert judge("eth0").status == "ok"
    down = {**states, "eth0": LinkState(False, 0, 1500)}
    assert (judge("eth0", states=down).status, judge("eth0", 1, down).status) == (
        "warning",
        "warning",
    )


def test_what_nccl_takes_by_itself():
    def taken(*names):
        found = network.nccl_order([Interface(name, ("192.0.2.1",)) for name in names])
        return [interface.name for interface in found]

    assert taken("lo", "eth0", "ib0", "ib1") == ["ib0", "ib1"]
    assert taken("lo", "docker0", "virbr0", "eth0", "enp1") == ["eth0", "enp1"]
    assert taken("lo", "docker0") == ["docker0"]
    assert taken("virbr0", "lo") == ["lo"]
    assert network.nccl_order([Interface("eth0", ())]) == ()
    assert network.choose("nccl", {}, (LO, ETH)).interfaces == ("eth0",)
    assert network.choose("nccl", {"NCCL_SOCKET_IFNAME": "lo"}, (LO, ETH)).interfaces == ("lo",)
    assert network.choose("nccl", {"NCCL_SOCKET_IFNAME": "=ib"}, (LO, ETH)).problem is not None


def test_rdma(tmp_path):
    assert network.read_rdma(tmp_path) == ()
    for number, (state, rate) in enumerate(
        (("4: ACTIVE", "400 Gb/sec (4X NDR)"), ("1: DOWN", "10"))
    ):
        folder = tmp_path / f"sys/class/infiniband/mlx5_{number}/ports/1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
        (folder / "rate").write_text(f"{rate}\n")
    # A port whose files cannot be read is left out.
    (tmp_path / "sys/class/infiniband/mlx5_9/ports/1").mkdir(parents=True)
    found = network.read_rdma(tmp_path)
    assert found == (
        RdmaPort("mlx5_0", 1, "ACTIVE", "400 Gb/sec (4X NDR)"),
        RdmaPort("mlx5_1", 1, "DOWN", "10"),
    )
    assert only(judge_network(rdma=found), "rdma").status == "warning"
    assert only(judge_network(rdma=found[:1]), "rdma").status == "ok"


def judge_names(nodes=None, **changes):
    return network.judge_names(replace(NAMES, **changes), nodes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("ok", "ok", "ok")),
        ({"addresses": ()}, ("warning", "ok", "warning")),
        ({"addresses": ("127.0.1.1",)}, ("warning", "ok", "warning")),
        ({"addresses": ("::1",)}, ("warning", "ok", "warning")),
        ({"addresses": ("198.51.100.7",)}, ("warning", "warning", "warning")),
        ({"seconds": 4.0}, ("warning", "warning", "warning")),
    ],
)
def test_hostname(changes, expected):
    """Where the number of nodes is not known, with one, and with two."""
    found = tuple(only(judge_names(n, **changes), "hostname").status for n in (None, 1, 2))
    assert found == expected


def test_meeting_place():
    def judge(nodes, *addresses):
        found = judge_names(nodes, master="head", master_addresses=addresses)
        return only(found, "master-address")

    assert only(judge_names(), "master-address").status == "not applicable"
    assert judge(2).status == "error"
    assert judge(2, "127.0.1.1").status == "error"
    assert judge(1, "127.0.0.1").status == "ok"
    assert "this node" in judge(2, "192.0.2.1").message
    assert "another node" in judge(2, "192.0.2.5").message
    assert only(judge_names(localhost=()), "localhost").status == "error"


def test_ports():
    def judge(**changes):
        return network.judge_ports(replace(PORTS, **changes))

    assert statuses(judge()) == {"port": "ok"}
    taken = only(judge(default_free=False), "port")
    assert (taken.status, "--master-port=40000" in taken.remedy) == ("warning", True)
    for master, free, status in (
        ("29600", True, "ok"),
        ("29600", False, "warning"),
        ("x", None, "error"),
        ("70000", None, "error"),
        ("0", None, "error"),
    ):
        assert only(judge(master=master, master_free=free), "master-port").status == status, master
    assert statuses(judge(inside_job=True, default_free=False, master="1", master_free=False)) == {
        "port": "not applicable"
    }


def test_port_in_use():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        port = listening.getsockname()[1]
        found = network.read_ports({"MASTER_PORT": str(port)})
        assert found.master_free is False
        assert found.free != port
    assert network.read_ports({"MASTER_PORT": str(port)}).master_free is True


def test_reading_names_of_this_node():
    found = network.read_names({"MASTER_ADDR": "127.0.0.1"})
    assert found.hostname == socket.gethostname()
    assert found.master_addresses == ("127.0.0.1",)
    assert network.read_names({"MASTER_ADDR": "no.such.host.invalid"}).master_addresses == ()
    # A name that cannot be encoded is no crash.
    assert network.read_names({"MASTER_ADDR": "x" * 300 + ".y"}).master_addresses == ()


# cores, time, disk, limits


def plant(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "nonsense\n\n:::\n"}, None),
        ({"proc/self/cgroup": "0::/job\n"}, None),
        (
            {"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/cpu.max": "150000 100000\n"},
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
            },
            4.0,
        ),
        # In a container the path is the host's, and the own group is the root of the mount.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "garbage\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1 0\n"}, None),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_quota(tmp_path, files, quota):
    assert host.read_quota(plant(tmp_path, files)) == quota


def judge_cores(ranks=2, gpus=False, **changes):
    return host.judge_cores(replace(CORES, **changes), ranks, gpus=gpus)


def test_cores():
    assert only(judge_cores(), "cores").message == "8 of 8 cores (0-7) for 2 ranks."
    assert only(judge_cores(ranks=9), "cores").status == "warning"
    few = only(judge_cores(allowed=(3,)), "cores")
    assert (few.status, "1 of 8 cores (3)" in few.message) == ("warning", True)
    held = only(judge_cores(quota=2.5), "cores")
    assert (held.status, "the time of 2.5" in held.message) == ("warning", True)
    assert "OMP_NUM_THREADS=1" in held.remedy
    assert only(judge_cores(quota=8.0), "cores").status == "ok"


def test_threads():
    def judge(threads, ranks=2, gpus=False, **changes):
        return only(judge_cores(ranks, gpus, threads=threads, **changes), "threads")

    unset = judge(None)
    assert (unset.status, "cores for 4 each" in unset.message) == ("warning", True)
    assert "OMP_NUM_THREADS=4" in unset.remedy
    assert judge(None, gpus=True).status == "ok"
    assert judge(None, ranks=1).status == "ok"
    assert judge(None, ranks=8).status == "ok"
    assert judge("4").status == "ok"
    assert judge("5").status == "warning"
    assert judge("4", quota=4.0).status == "warning"
    assert judge("4,2").status == "ok"
    for wrong in ("", "0", "-1", "many"):
        assert wrong == "" or judge(wrong).status == "warning", wrong


def test_clock():
    def judge(nodes=None, **changes):
        return statuses(host.judge_clock(replace(CLOCK, **changes), nodes))

    assert judge() == {"clock-source": "ok", "clock-resolution": "ok", "clock-sync": "ok"}
    assert judge(source="hpet")["clock-source"] == "warning"
    assert judge(source=None)["clock-source"] == "not applicable"
    assert judge(resolution_ns=4e6)["clock-resolution"] == "warning"
    found = [judge(nodes, synchronised=False)["clock-sync"] for nodes in (None, 1, 2)]
    assert found == ["warning", "not applicable", "warning"]
    assert judge(synchronised=None)["clock-sync"] == "not applicable"


def test_reading_the_clock(tmp_path):
    here = host.read_clock()
    assert 1 <= here.reading_ns < 1e6
    assert 0 < here.resolution_ns <= 1e7
    folder = "sys/devices/system/clocksource/clocksource0"
    planted = plant(
        tmp_path,
        {
            f"{folder}/current_clocksource": "acpi_pm\n",
            f"{folder}/available_clocksource": "tsc acpi_pm\n",
        },
    )
    found = host.read_clock(planted)
    assert (found.source, found.available) == ("acpi_pm", ("tsc", "acpi_pm"))
    remedy = only(host.judge_clock(found, 1), "clock-source").remedy
    assert remedy.startswith("echo tsc >")
    assert host.read_clock(tmp_path / "nothing").source is None


def test_disk(tmp_path):
    def judge(**changes):
        return only(host.judge_disk(replace(DISK, **changes)), "disk")

    assert judge().message == "/home/me/runs (ext4): 50.0 GB free."
    assert judge(folder="/home/me").message.startswith("/home/me (for runs)")
    assert judge(writable=False).status == "error"
    assert judge(free_bytes=0).status == "error"
    assert judge(free_files=0).status == "error"
    assert judge(free_bytes=10_000_000).status == "warning"


def test_reading_the_disk(tmp_path):
    found = host.read_disk(tmp_path / "not" / "yet")
    assert (found.folder, found.writable) == (str(tmp_path), True)
    assert found.free_bytes > 0
    file = tmp_path / "file"
    file.write_text("")
    assert host.read_disk(file / "runs").writable is False
    mounts = (
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "23 22 0:20 / /my\\040scratch rw shared:1 - lustre mds:/x rw\n"
        "garbage\n24 22 0:21 / /my - nfs\n"
    )
    planted = plant(tmp_path, {"proc/self/mountinfo": mounts})
    assert host._file_system(Path("/my scratch/runs"), planted) == "lustre"
    assert host._file_system(Path("/my scratchy"), planted) == "ext4"
    assert host._file_system(Path("/x"), tmp_path / "nothing") is None


def judge_limits(ranks=2, rdma=False, **changes):
    return host.judge_limits(replace(LIMITS, **changes), ranks, rdma=rdma)


def test_limits():
    assert statuses(judge_limits()) == {"memlock": "ok", "open-files": "ok", "shm": "ok"}
    locked = {"memlock_bytes": 8_388_608}
    assert only(judge_limits(**locked), "memlock").status == "not applicable"
    assert only(judge_limits(rdma=True, **locked), "memlock").status == "warning"
    few = only(judge_limits(open_files=256, open_files_most=4096), "open-files")
    assert (few.status, few.remedy) == ("warning", "ulimit -n 4096")
    # What Docker gives.
    small = only(judge_limits(shm_bytes=64_000_000, shm_free_bytes=64_000_000), "shm")
    assert small.status == "warning"
    assert "on each of 2 ranks a batch has 4.0 MB" in small.message
    none = {"shm_bytes": None, "shm_free_bytes": None}
    assert only(judge_limits(**none), "shm").status == "warning"
    assert only(judge_limits(linux=False, **none), "shm").status == "not applicable"


def test_reading_limits(tmp_path):
    assert host.read_limits(tmp_path / "nothing").shm_bytes is None
    here = host.read_limits(tmp_path)
    assert here.shm_bytes >= here.shm_free_bytes > 0


# variables and combinations


def judge_variables(gpu=True, rdma=True, **environ):
    return variables.judge_variables(environ, gpu=gpu, rdma=rdma)


@pytest.mark.parametrize(
    ("name", "value", "hurts"),
    [
        ("NCCL_P2P_DISABLE", "1", True),
        ("NCCL_P2P_DISABLE", "0", False),
        ("NCCL_P2P_LEVEL", "loc", True),
        ("NCCL_P2P_LEVEL", "NVL", False),
        ("NCCL_SHM_DISABLE", "1", True),
        ("NCCL_IB_DISABLE", "1", True),
        ("NCCL_NET", "Socket", True),
        ("NCCL_NET", "IB", False),
        ("NCCL_NET_GDR_LEVEL", "LOC", True),
        ("NCCL_ALGO", "Ring", True),
        ("NCCL_PROTO", "Simple", True),
        ("NCCL_DEBUG", "INFO", True),
        ("NCCL_DEBUG", "info", True),
        ("NCCL_DEBUG", "WARN", False),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", True),
        ("TORCH_DISTRIBUTED_DEBUG", "OFF", False),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", True),
        ("NCCL_BLOCKING_WAIT", "1", True),
        ("TORCH_NCCL_ENABLE_TIMING", "1", True),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", True),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", False),
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", True),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", False),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", True),
        ("NVIDIA_TF32_OVERRIDE", "0", True),
        ("NVIDIA_TF32_OVERRIDE", "1", False),
        ("GLOO_DEVICE_TRANSPORT", "TCP_TLS", True),
    ],
)
def test_variable(name, value, hurts):
    found = judge_variables(**{name: value})
    assert statuses(found) == ({f"variable-{name}": "warning"} if hurts else {"variables": "ok"})


def test_every_variable_is_tried():
    cases = {mark.args[1][n][0] for mark in test_variable.pytestmark for n in range(29)}
    assert cases == {entry.name for entry in variables.HURTING}


def test_variables_without_effect():
    found = judge_variables(gpu=False, rdma=False, NCCL_P2P_DISABLE="1", NCCL_IB_DISABLE="1")
    assert statuses(found) == {"variables-idle": "not applicable"}
    both = judge_variables(rdma=False, NCCL_IB_DISABLE="1", CUDA_LAUNCH_BLOCKING="1")
    assert statuses(both) == {
        "variable-CUDA_LAUNCH_BLOCKING": "warning",
        "variables-idle": "not applicable",
    }


@pytest.mark.parametrize(
    ("setting", "ids"),
    [
        (Setting(kernel="6.1.0-18-amd64"), {"combinations": "ok"}),
        (Setting(kernel="4.18.0-553.el8.x86_64"), {"kernel-5.5": "warning"}),
        (Setting(kernel="5.5.0"), {"combinations": "ok"}),
        (Setting(), {"combinations": "not applicable"}),
        (Setting(kernel="unknown"), {"combinations": "ok"}),
        (
            Setting(kernel="6.1", gpus=("NVIDIA GeForce RTX 4090",) * 2, driver="545.29"),
            {"rtx40-driver": "warning"},
        ),
        (
            Setting(kernel="6.1", gpus=("NVIDIA GeForce RTX 4090",), driver="545.29"),
            {"combinations": "ok"},
        ),
        (
            Setting(kernel="6.1", gpus=("NVIDIA GeForce RTX 4090",) * 2, driver="550.54"),
            {"combinations": "ok"},
        ),
        (Setting(kernel="6.1", gpus=("H100",), nccl="2.29.2"), {"nccl-2.29.2": "warning"}),
        (
            Setting(kernel="6.1", gpus=("GB200",), machine="aarch64", nccl="2.28.9"),
            {"nccl-arm": "warning"},
        ),
        (
            Setting(kernel="6.1", gpus=("GB200",), machine="aarch64", nccl="2.29.3"),
            {"combinations": "ok"},
        ),
        (
            Setting(kernel="6.1", gpus=("H100",), torch="2.7.0+cu126"),
            {"torch-2.7.0-nonblocking": "warning"},
        ),
        (Setting(kernel="6.1", gpus=("H100",), torch="2.7.1"), {"combinations": "ok"}),
    ],
)
def test_combination(setting, ids):
    assert statuses(combinations.judge_combinations(setting)) == ids


def test_every_combination_has_its_numbers_filled_in():
    setting = Setting("4.1", "aarch64", "500.1", ("RTX 4090",) * 2, "2.29.2", "2.7.0")
    found = combinations.judge_combinations(setting)
    assert {v.id for v in found} == {known.id for known in combinations.KNOWN}
    assert not [v.message for v in found if "{" in v.message or "None" in v.message]


def test_documents_name_each():
    page = (ROOT / "docs" / "doctor.md").read_text()
    for name in [e.name for e in variables.HURTING] + [k.id for k in combinations.KNOWN]:
        assert f"`{name}`" in page, name
    sources = {e.source for e in variables.HURTING} | {k.source for k in combinations.KNOWN}
    assert not [source for source in sources if source not in page]
    for topic in good_facts():
        assert f"`{topic}`" in page, topic


# the whole


def test_good_machine():
    found = examination.judge(good_facts(cores=replace(CORES, threads="4")), environ={})
    assert found.can_run
    assert (found.ranks, found.ranks_from) == (2, "GPUs")
    assert found.counts["error"] == 0
    assert [v.id for s in found.sections for v in s.verdicts if v.status == "warning"] == []


def test_nothing_is_known():
    """Each topic then has one line, and nothing is called impossible."""
    found = examination.judge({topic: Unread("broken") for topic in good_facts()}, environ={})
    assert found.can_run
    unread = [v for s in found.sections for v in s.verdicts if "broken" in v.message]
    assert [v.id for v in unread] == list(good_facts())


def test_ranks_and_nodes():
    def ranks(environ, asked=None, gpus=0, cores=CORES):
        return examination.count_ranks(asked, gpus, cores, environ)

    assert ranks({}, asked=5, gpus=2) == (5, "--ranks")
    assert ranks({"LOCAL_WORLD_SIZE": "4"}, gpus=2) == (4, "LOCAL_WORLD_SIZE")
    assert ranks({"SLURM_NTASKS_PER_NODE": "3(x2)"}, gpus=2) == (2, "GPUs")
    assert ranks({"SLURM_NTASKS_PER_NODE": "4"}, gpus=2) == (4, "SLURM_NTASKS_PER_NODE")
    # As launch/slurm.sbatch starts torchrun.
    assert ranks({"SLURM_NTASKS_PER_NODE": "1"}, gpus=2) == (2, "GPUs")
    assert ranks({}) == (2, "no GPU")
    assert ranks({}, cores=replace(CORES, allowed=(0,))) == (1, "one core")
    assert ranks({}, cores=None) == (2, "no GPU")
    assert examination.count_nodes({}) is None
    assert examination.count_nodes({"SLURM_NNODES": "2"}) == 2
    assert examination.count_nodes({"SLURM_NNODES": "two"}) is None


def test_readers_that_hang_or_fail():
    def fail():
        raise RuntimeError("first\nsecond")

    stop = threading.Event()
    begun = time.monotonic()
    found = read_all(
        {
            "hangs": Reader(stop.wait, 0.5),
            "hangs too": Reader(stop.wait, 0.5),
            "fails": Reader(fail, 5),
            "works": Reader(lambda: 7, 5),
        }
    )
    took_s = time.monotonic() - begun
    stop.set()
    assert found["hangs"] == found["hangs too"] == Unread("no answer within 0.5 s")
    assert found["fails"] == Unread("first")
    assert found["works"] == 7
    # Limits run together, not one after the other.
    assert 0.5 <= took_s < 5


def test_text_fits_80_columns():
    """Also with names that are long, and with what a terminal would obey."""
    long = "x" * 300 + "\x1b[31m"
    bad = good_facts(
        software=Software(replace(TORCH, nccl_path=f"/{long}", nccl_loaded="2.1.0"), WANTED, ()),
        disk=replace(DISK, folder=f"/{long}", writable=False),
        names=replace(NAMES, hostname=long, addresses=()),
        gpus=cards(h100(0), h100(1, name=long, mig=True, processes=3)),
        network=replace(NETWORK, gloo=Choice(problem=long, remedy=long)),
    )
    environ = {entry.name: "1" for entry in variables.HURTING} | {"NCCL_ALGO": long}
    found = examination.judge(bad, nodes=2, environ=environ)
    for color in (False, True):
        shown = text.render(found, color=color)
        assert "\x1b[31m" not in shown
    plain = text.render(found)
    assert max(map(len, plain.splitlines())) <= 80
    assert "\x1b" not in plain
    assert plain.rstrip().endswith("a run cannot start")
    sources = {v.source for s in found.sections for v in s.verdicts if v.source}
    assert len(sources) > 5
    assert not [source for source in sources if source not in plain]
    of_tables = {e.source for e in variables.HURTING} | {k.source for k in combinations.KNOWN}
    assert not [source for source in of_tables if len(source) > 80]


def test_every_warning_has_a_remedy():
    environ = {entry.name: "1" for entry in variables.HURTING}
    bad = good_facts(disk=replace(DISK, writable=False), ports=replace(PORTS, default_free=False))
    found = examination.judge(bad, ranks=64, nodes=4, environ=environ)
    for section in found.sections:
        assert section.verdicts, section.topic
        for verdict in section.verdicts:
            assert (verdict.remedy is not None) == (verdict.status in ("warning", "error"))


def test_json_holds_all():
    found = examination.judge(good_facts(ports=Unread("no")), nodes=2, environ={})
    document = json.loads(json.dumps(examination.as_json(found)))
    assert document["can_run"] is True
    assert document["nodes"] == 2
    assert sum(document["counts"].values()) == len(document["checks"])
    keys = {"topic", "id", "status", "message", "remedy", "source"}
    assert all(set(check) == keys for check in document["checks"])
    assert document["facts"]["software"]["torch"]["nccl_loaded"] == "2.29.7"
    assert document["facts"]["ports"] == {"unread": "no"}


@pytest.mark.parametrize(("writable", "code"), [(True, 0), (False, 1)])
def test_exit_code(monkeypatch, capsys, writable, code):
    facts = good_facts(disk=replace(DISK, writable=writable))
    monkeypatch.setattr(examination, "read_all", lambda readers: facts)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == code
    assert ("a run cannot start" in capsys.readouterr().out) == (code == 1)


def test_command_without_torch(tmp_path):
    """The whole, as it is called, with a torch that cannot be imported: one line says so."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libgone.so: cannot open')")
    called = subprocess.run(
        [sys.executable, "-m", "ddp_profiler.cli", "doctor", "--json", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert called.returncode == 1, called.stderr
    assert called.stderr == ""
    errors = [c for c in json.loads(called.stdout)["checks"] if c["status"] == "error"]
    assert [c["id"] for c in errors] == ["torch"]
    assert "libgone.so" in errors[0]["message"]
