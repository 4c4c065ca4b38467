"""What data sheets say of devices, and which of them is a given device's.

A row is found by the exact name that ``torch.cuda.get_device_name`` gives, and must then agree
with the device's memory and number of multiprocessors: a name alone does not tell a whole device
from a slice of it. Nothing is guessed: an unknown name has no data sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_TERA, _GIGA = 1e12, 1e9
_MEMORY_APART = 0.1
"""Vendors print 141 GB for 141 GiB, less what is held back."""
_POWER_APART = 0.02


@dataclass(frozen=True)
class DataSheet:
    """A vendor's figures for one part, without sparsity.

    Attributes:
        part: The vendor's name of it.
        source: The document that has the figures.
        flops_per_s: Peak rate of dense matrix products by what they compute in (``fp32``,
            ``tf32``, ``bf16``, ``fp16``); what the part does not do is absent. ``fp32`` is without
            tensor cores on NVIDIA's parts, and with matrix cores on AMD's.
        memory_bytes: Size of its memory, as printed.
        memory_bytes_per_s: Peak bandwidth of its memory.
        link: Name of its link to other devices; None if it has none.
        link_bytes_per_s: That link's bandwidth to all other devices together, both directions
            added, as vendors print it.
        pcie_bytes_per_s: The same of PCIe; None where no source was found.
        multiprocessors: Multiprocessors (NVIDIA) or compute units (AMD).
        power_w: Power limit for which the figures hold, in W.
    """

    part: str
    source: str
    flops_per_s: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    link: str | None
    link_bytes_per_s: float | None
    pcie_bytes_per_s: float | None
    multiprocessors: int
    power_w: float


def _sheet(
    part: str,
    source: str,
    tera_flops: Mapping[str, float],
    memory_gb: float,
    memory_gb_per_s: float,
    link: tuple[str, float] | None,
    pcie_gb_per_s: float | None,
    multiprocessors: int,
    power_w: float,
) -> DataSheet:
    return DataSheet(
        part=part,
        source=source,
        flops_per_s={name: round(rate * _TERA) for name, rate in tera_flops.items()},
        memory_bytes=memory_gb * _GIGA,
        memory_bytes_per_s=memory_gb_per_s * _GIGA,
        link=link[0] if link else None,
        link_bytes_per_s=link[1] * _GIGA if link else None,
        pcie_bytes_per_s=None if pcie_gb_per_s is None else pcie_gb_per_s * _GIGA,
        multiprocessors=multiprocessors,
        power_w=power_w,
    )


def _rates(fp32: float, tf32: float | None, bf16: float | None, fp16: float) -> dict[str, float]:
    rates = {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16}
    return {name: rate for name, rate in rates.items() if rate is not None}


# NVIDIA prints tensor rates of Hopper and Blackwell with sparsity: here they are halved.
_A100 = _rates(19.5, 156, 312, 312)
_H100_SXM = _rates(67, 989 / 2, 1979 / 2, 1979 / 2)
_HOPPER_NVL = _rates(60, 835 / 2, 1671 / 2, 1671 / 2)
_A100_SOURCE = "NVIDIA A100 Tensor Core GPU data sheet"
_H100_SOURCE = "NVIDIA H100 Tensor Core GPU data sheet (tensor rates with sparsity, halved)"
_H200_SOURCE = "NVIDIA H200 Tensor Core GPU product page (tensor rates with sparsity, halved)"
_V100_SOURCE = "NVIDIA V100 Tensor Core GPU data sheet"

_V100_SXM2 = _rates(15.7, None, None, 125)
_V100_PCIE = _rates(14, None, None, 112)

_SHEETS: dict[str, DataSheet] = {
    "Tesla V100-SXM2-16GB": _sheet(
        "V100 SXM2 16GB", _V100_SOURCE, _V100_SXM2, 16, 900, ("NVLink", 300), 32, 80, 300
    ),
    "Tesla V100-SXM2-32GB": _sheet(
        "V100 SXM2 32GB", _V100_SOURCE, _V100_SXM2, 32, 900, ("NVLink", 300), 32, 80, 300
    ),
    "Tesla V100-PCIE-16GB": _sheet(
        "V100 PCIe 16GB", _V100_SOURCE, _V100_PCIE, 16, 900, None, 32, 80, 250
    ),
    "Tesla V100-PCIE-32GB": _sheet(
        "V100 PCIe 32GB", _V100_SOURCE, _V100_PCIE, 32, 900, None, 32, 80, 250
    ),
    "Tesla V100S-PCIE-32GB": _sheet(
        "V100S PCIe 32GB",
        _V100_SOURCE,
        _rates(16.4, None, None, 130),
        32,
        1134,
        None,
        32,
        80,
        250,
    ),
    "A100-SXM4-40GB": _sheet(
        "A100 SXM 40GB", _A100_SOURCE, _A100, 40, 1555, ("NVLink", 600), 64, 108, 400
    ),
    "A100-SXM4-80GB": _sheet(
        "A100 SXM 80GB", _A100_SOURCE, _A100, 80, 2039, ("NVLink", 600), 64, 108, 400
    ),
    "A100-PCIE-40GB": _sheet(
        "A100 PCIe 40GB", _A100_SOURCE, _A100, 40, 1555, ("NVLink bridge", 600), 64, 108, 250
    ),
    "A100 80GB PCIe": _sheet(
        "A100 PCIe 80GB", _A100_SOURCE, _A100, 80, 1935, ("NVLink bridge", 600), 64, 108, 300
    ),
    "L40S": _sheet(
        "L40S",
        "NVIDIA L40S data sheet",
        _rates(91.6, 183, 362.05, 362.05),
        48,
        864,
        None,
        64,
        142,
        350,
    ),
    "H100 80GB HBM3": _sheet(
        "H100 SXM", _H100_SOURCE, _H100_SXM, 80, 3350, ("NVLink", 900), 128, 132, 700
    ),
    "H100 PCIe": _sheet(
        "H100 PCIe",
        "NVIDIA H100 Tensor Core GPU data sheet, first edition, with the H100 PCIe column "
        "(tensor rates with sparsity, halved)",
        _rates(51, 756 / 2, 1513 / 2, 1513 / 2),
        80,
        2000,
        ("NVLink bridge", 600),
        128,
        114,
        350,
    ),
    "H100 NVL": _sheet(
        "H100 NVL", _H100_SOURCE, _HOPPER_NVL, 94, 3900, ("NVLink bridge", 600), 128, 132, 400
    ),
    "H200": _sheet("H200 SXM", _H200_SOURCE, _H100_SXM, 141, 4800, ("NVLink", 900), 128, 132, 700),
    "H200 NVL": _sheet(
        "H200 NVL", _H200_SOURCE, _HOPPER_NVL, 141, 4800, ("NVLink bridge", 900), 128, 132, 600
    ),
    "H20": _sheet(
        "H20 96GB",
        "NVIDIA H20 figures as resellers and the press print them; NVIDIA publishes no data sheet",
        _rates(44, 74, 148, 148),
        96,
        4000,
        ("NVLink", 900),
        None,
        78,
        400,
    ),
    "B200": _sheet(
        "HGX B200",
        "NVIDIA Blackwell data sheet, HGX B200 (tensor rates with sparsity, halved)",
        _rates(75, 2200 / 2, 4500 / 2, 4500 / 2),
        180,
        7700,
        ("NVLink", 1800),
        128,
        148,
        1000,
    ),
    "AMD Instinct MI300X": _sheet(
        "MI300X",
        "AMD Instinct MI300X accelerator data sheet",
        _rates(163.4, 653.7, 1307.4, 1307.4),
        192,
        5300,
        ("Infinity Fabric (xGMI)", 896),
        128,
        304,
        750,
    ),
}
_SAME_PART = {"AMD Instinct MI300X OAM": "AMD Instinct MI300X"}


@dataclass(frozen=True)
class Match:
    """What was found: a data sheet, or why there is none.

    Attributes:
        sheet: The device's data sheet.
        reason: Why it is None; or what is not known of a device that has one.
    """

    sheet: DataSheet | None
    reason: str | None


def find_sheet(
    name: str,
    memory_bytes: int | None = None,
    multiprocessors: int | None = None,
    power_limit_w: float | None = None,
) -> Match:
    """Finds the data sheet of a device, or says why none holds for it.

    >>> find_sheet("NVIDIA H200").sheet.part
    'H200 SXM'
    >>> find_sheet("NVIDIA A100-SXM4-40GB MIG 1g.5gb").sheet is None
    True

    Args:
        name: As ``torch.cuda.get_device_name`` has it.
        memory_bytes: Its memory, if known.
        multiprocessors: How many it has, if known.
        power_limit_w: The power limit in force in W, if known.
    """
    short = name.removeprefix("NVIDIA ")
    sheet = _SHEETS.get(_SAME_PART.get(short, short))
    if sheet is None:
        slice_of = " MIG " in name
        return Match(None, "a slice of a device has none" if slice_of else "no row for this name")
    if memory_bytes is not None and abs(memory_bytes / sheet.memory_bytes - 1) > _MEMORY_APART:
        return Match(
            None,
            f"the device has {memory_bytes / _GIGA:.0f} GB of memory, {sheet.part} has "
            f"{sheet.memory_bytes / _GIGA:.0f} GB",
        )
    if multiprocessors is not None and multiprocessors != sheet.multiprocessors:
        return Match(
            None,
            f"the device shows {multiprocessors} multiprocessors, {sheet.part} has "
            f"{sheet.multiprocessors}",
        )
    if power_limit_w is None:
        return Match(sheet, "the device's power limit is not known")
    if power_limit_w < sheet.power_w * (1 - _POWER_APART):
        return Match(
            None,
            f"the device's power is limited to {power_limit_w:.0f} W, the figures are for "
            f"{sheet.power_w:.0f} W",
        )
    return Match(sheet, None)


def sheets() -> Mapping[str, DataSheet]:
    """Returns all rows by device name (without ``NVIDIA`` in front)."""
    return _SHEETS
