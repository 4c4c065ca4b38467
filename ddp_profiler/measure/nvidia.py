"""Clocks, limits and link of an NVIDIA GPU, through nvidia-ml-py where it is installed."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddp_profiler.schema import GpuUse

CLOCK_REASONS = {
    0x002: "clocks set by the user",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal",
    0x040: "hardware thermal",
    0x080: "power brake",
    0x100: "display clocks",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons. Bit 0x001 says that the GPU is idle, which
is no reason why it is slow."""


class NvidiaGpu:
    """One GPU that NVIDIA's management library can be asked about.

    Args:
        library: The module ``pynvml``, initialised.
        handle: Its handle of the GPU.
    """

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle

    def read(self) -> dict[str, float]:
        """Returns what can be read now, by field of :class:`GpuUse`, and the bits of reasons.

        Drivers and GPUs differ in what they offer; what is not offered is left out.
        """
        nvml = self._library
        readers: dict[str, Sequence[Callable[[Any], Any]]] = {
            # The new name first: an older driver does not have it and says so.
            "reasons": self._named(
                "nvmlDeviceGetCurrentClocksEventReasons",
                "nvmlDeviceGetCurrentClocksThrottleReasons",
            ),
            "sm_mhz": self._named("nvmlDeviceGetClockInfo", argument=nvml.NVML_CLOCK_SM),
            "sm_mhz_max": self._named("nvmlDeviceGetMaxClockInfo", argument=nvml.NVML_CLOCK_SM),
            "power_w": self._named("nvmlDeviceGetPowerUsage", scale=1e-3),
            "power_limit_w": self._named("nvmlDeviceGetEnforcedPowerLimit", scale=1e-3),
            # The new one may lack in the driver, the old one goes away with CUDA 14.
            "temperature_c": self._named(
                "nvmlDeviceGetTemperatureV",
                "nvmlDeviceGetTemperature",
                argument=nvml.NVML_TEMPERATURE_GPU,
            ),
            "pcie_generation": self._named("nvmlDeviceGetCurrPcieLinkGeneration"),
            "pcie_generation_max": self._named("nvmlDeviceGetMaxPcieLinkGeneration"),
            "pcie_width": self._named("nvmlDeviceGetCurrPcieLinkWidth"),
            "pcie_width_max": self._named("nvmlDeviceGetMaxPcieLinkWidth"),
        }
        found = {}
        for name, functions in readers.items():
            for function in functions:
                try:
                    found[name] = function(self._handle)
                    break
                except Exception:  # of any kind; evidence is not worth a run
                    continue
        return found

    def _named(
        self, *names: str, argument: int | None = None, scale: float = 1
    ) -> list[Callable[[Any], Any]]:
        """Returns those of the library's functions that there are, ready to be given a handle."""

        def make(function: Callable[..., Any]) -> Callable[[Any], Any]:
            arguments = () if argument is None else (argument,)
            return lambda handle: function(handle, *arguments) * scale

        return [
            make(getattr(self._library, name)) for name in names if hasattr(self._library, name)
        ]

    def condense(self, readings: Sequence[Mapping[str, float]]) -> GpuUse:
        """Condenses readings: clock and power as means, the rest as the most that was read."""

        def values(name: str) -> list[float]:
            return [reading[name] for reading in readings if name in reading]

        def mean(name: str) -> float | None:
            known = values(name)
            return round(sum(known) / len(known), 1) if known else None

        def most(name: str) -> int | None:
            return round(max(values(name), default=0)) or None

        masks = [int(mask) for mask in values("reasons")]
        shares = {
            word: round(sum(bool(mask & bit) for mask in masks) / len(masks), 2)
            for bit, word in CLOCK_REASONS.items()
            if masks
        }
        return GpuUse(
            sm_mhz=mean("sm_mhz"),
            sm_mhz_max=mean("sm_mhz_max"),
            clock_reasons={word: share for word, share in shares.items() if share},
            power_w=mean("power_w"),
            power_limit_w=mean("power_limit_w"),
            temperature_c=most("temperature_c"),
            pcie_generation=most("pcie_generation"),
            pcie_generation_max=most("pcie_generation_max"),
            pcie_width=most("pcie_width"),
            pcie_width_max=most("pcie_width_max"),
        )


def open_gpu(device: Any, library: Any = None, properties: Any = None) -> NvidiaGpu | None:
    """Returns the GPU behind a torch device; None if it is none or cannot be asked.

    Args:
        device: The rank's device, a ``torch.device``.
        library: Stands in for ``pynvml`` in tests.
        properties: Stands in for what torch says of the device in tests.
    """
    # Here, so that GPUs can be asked about where there is no torch.
    import torch

    if device.type != "cuda" or (torch.version.hip is not None and library is None):
        return None
    try:
        nvml = library or importlib.import_module("pynvml")
        nvml.nvmlInit()
        told = properties or torch.cuda.get_device_properties(device)
    except Exception:  # not installed, no driver, a driver of another version
        return None
    for find in (_by_uuid, _by_pci_bus):
        try:
            return NvidiaGpu(nvml, find(nvml, told))
        except Exception:
            continue
    return None


# The index of a CUDA device is not the library's: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER
# change the first one only. UUID and bus name the device in both.


def _by_uuid(nvml: Any, properties: Any) -> Any:
    # torch gives the bare number; the library's names begin with "GPU-".
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.UUID(str(properties.uuid))}")


def _by_pci_bus(nvml: Any, properties: Any) -> Any:
    domain, bus, device = (
        int(getattr(properties, f"pci_{name}_id")) for name in ("domain", "bus", "device")
    )
    return nvml.nvmlDeviceGetHandleByPciBusId(f"{domain:08X}:{bus:02X}:{device:02X}.0")
