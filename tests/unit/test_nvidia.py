"""NVIDIA's management library, stood in for by a module made by hand."""

import types
from types import SimpleNamespace

import pytest
import torch

from ddp_profiler.measure import nvidia
from ddp_profiler.measure.nvidia import CLOCK_REASONS, NvidiaGpu, open_gpu
from ddp_profiler.schema import GpuUse

UUID = "11111111-2222-3333-4444-555555555555"
CUDA = torch.device("cuda:0")
PROPERTIES = SimpleNamespace(uuid=UUID, pci_domain_id=0, pci_bus_id=0x4B, pci_device_id=0)


class NVMLError(Exception):
    pass


def fake_nvml(**changes):
    """The names of pynvml that are used; the visible device is the library's second one."""
    handles = {f"GPU-{UUID}": "second", "00000000:4B:00.0": "second"}

    def of(value):
        def answer(handle, *_):
            assert handle == "second"
            return value

        return answer

    def clock(values):
        return lambda handle, kind: values[kind]

    names = {
        "NVML_CLOCK_SM": 1,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": handles.__getitem__,
        "nvmlDeviceGetHandleByPciBusId": handles.__getitem__,
        "nvmlDeviceGetCurrentClocksEventReasons": of(0x4 | 0x20 | 0x1),
        "nvmlDeviceGetCurrentClocksThrottleReasons": of(0x80),
        "nvmlDeviceGetClockInfo": clock({0: 1, 1: 900, 2: 3}),
        "nvmlDeviceGetMaxClockInfo": clock({0: 1, 1: 1980, 2: 3}),
        "nvmlDeviceGetPowerUsage": of(690_400),
        "nvmlDeviceGetEnforcedPowerLimit": of(700_000),
        "nvmlDeviceGetTemperatureV": of(86),
        "nvmlDeviceGetTemperature": of(1),
        "nvmlDeviceGetCurrPcieLinkGeneration": of(4),
        "nvmlDeviceGetMaxPcieLinkGeneration": of(5),
        "nvmlDeviceGetCurrPcieLinkWidth": of(4),
        "nvmlDeviceGetMaxPcieLinkWidth": of(16),
        **changes,
    }
    return types.SimpleNamespace(**{n: f for n, f in names.items() if f is not None})


def not_there(*_):
    raise NVMLError("Function Not Found")


def use_of(library, times=1):
    gpu = open_gpu(CUDA, library, PROPERTIES)
    return gpu.condense([gpu.read() for _ in range(times)])


def test_all_figures():
    assert use_of(fake_nvml()) == GpuUse(
        sm_mhz=900,
        sm_mhz_max=1980,
        clock_reasons={"power cap": 1.0, "thermal": 1.0},
        power_w=690.4,
        power_limit_w=700,
        temperature_c=86,
        pcie_generation=4,
        pcie_generation_max=5,
        pcie_width=4,
        pcie_width_max=16,
    )


@pytest.mark.parametrize("event", [None, not_there])
def test_an_older_library_or_driver(event):
    use = use_of(
        fake_nvml(nvmlDeviceGetCurrentClocksEventReasons=event, nvmlDeviceGetTemperatureV=event)
    )
    assert use.clock_reasons == {"power brake": 1.0}
    assert use.temperature_c == 1


def test_what_a_gpu_does_not_offer_is_none():
    functions = [name for name in vars(fake_nvml()) if name.startswith("nvmlDeviceGet")]
    broken = {name: not_there for name in functions if "HandleBy" not in name}
    assert use_of(fake_nvml(**broken)) == GpuUse()


def test_the_device_is_found_by_bus_where_its_uuid_is_unknown():
    assert use_of(fake_nvml(nvmlDeviceGetHandleByUUID=not_there)).sm_mhz == 900
    both = {"nvmlDeviceGetHandleByUUID": not_there, "nvmlDeviceGetHandleByPciBusId": not_there}
    assert open_gpu(CUDA, fake_nvml(**both), PROPERTIES) is None


def test_no_gpu_no_driver_no_library(monkeypatch):
    assert open_gpu(torch.device("cpu"), fake_nvml(), PROPERTIES) is None
    assert open_gpu(CUDA, fake_nvml(nvmlInit=not_there), PROPERTIES) is None

    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(nvidia.importlib, "import_module", missing)
    assert open_gpu(CUDA, None, PROPERTIES) is None


def test_readings_are_condensed():
    gpu = NvidiaGpu(fake_nvml(), "second")
    readings = [
        {"sm_mhz": 1000, "reasons": 0x4, "temperature_c": 60, "pcie_width": 8},
        {"sm_mhz": 2000, "reasons": 0x1, "temperature_c": 70, "pcie_width": 16},
    ]
    assert gpu.condense(readings) == GpuUse(
        sm_mhz=1500, clock_reasons={"power cap": 0.5}, temperature_c=70, pcie_width=16
    )


def test_names_are_those_of_the_real_library():
    pynvml = pytest.importorskip("pynvml")
    assert {name for name in vars(fake_nvml()) if not hasattr(pynvml, name)} == set()
    assert pynvml.NVML_CLOCK_SM == 1
    bits = {
        "power cap": pynvml.nvmlClocksEventReasonSwPowerCap,
        "thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
        "hardware thermal": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
        "hardware slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
        "power brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        "sync boost": pynvml.nvmlClocksEventReasonSyncBoost,
        "clocks set by the user": pynvml.nvmlClocksEventReasonApplicationsClocksSetting,
        "display clocks": pynvml.nvmlClocksEventReasonDisplayClockSetting,
    }
    assert {word: bit for bit, word in CLOCK_REASONS.items()} == bits
