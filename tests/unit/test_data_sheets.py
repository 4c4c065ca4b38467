"""Data sheets: whose they are, and that their figures are dense and hang together."""

import pytest

from ddp_profiler.analysis.data_sheets import find_sheet, sheets

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "memory_bytes", "multiprocessors", "part"),
    [
        # Memory as the driver of such a device reports it.
        ("NVIDIA H100 80GB HBM3", 81559 * 2**20, 132, "H100 SXM"),
        ("NVIDIA H100 PCIe", 81559 * 2**20, 114, "H100 PCIe"),
        ("NVIDIA H100 NVL", 95830 * 2**20, 132, "H100 NVL"),
        ("NVIDIA H200", 143771 * 2**20, 132, "H200 SXM"),
        ("NVIDIA H200 NVL", 143771 * 2**20, 132, "H200 NVL"),
        ("NVIDIA H20", 97871 * 2**20, 78, "H20 96GB"),
        ("NVIDIA A100-SXM4-80GB", 81920 * 2**20, 108, "A100 SXM 80GB"),
        ("NVIDIA A100-SXM4-40GB", 40960 * 2**20, 108, "A100 SXM 40GB"),
        ("A100-SXM4-40GB", 40537 * 2**20, 108, "A100 SXM 40GB"),
        ("NVIDIA A100-PCIE-40GB", 40960 * 2**20, 108, "A100 PCIe 40GB"),
        ("NVIDIA A100 80GB PCIe", 81920 * 2**20, 108, "A100 PCIe 80GB"),
        ("NVIDIA L40S", 46068 * 2**20, 142, "L40S"),
        ("NVIDIA B200", 183359 * 2**20, 148, "HGX B200"),
        ("Tesla V100-SXM2-32GB", 32768 * 2**20, 80, "V100 SXM2 32GB"),
        ("Tesla V100-SXM2-16GB", 16384 * 2**20, 80, "V100 SXM2 16GB"),
        ("Tesla V100-PCIE-32GB", 32768 * 2**20, 80, "V100 PCIe 32GB"),
        ("Tesla V100S-PCIE-32GB", 32768 * 2**20, 80, "V100S PCIe 32GB"),
        ("AMD Instinct MI300X", 192 * GIB, 304, "MI300X"),
        ("AMD Instinct MI300X OAM", 192 * GIB, 304, "MI300X"),
    ],
)
def test_names_that_devices_give(name, memory_bytes, multiprocessors, part):
    match = find_sheet(name, memory_bytes, multiprocessors, power_limit_w=1000)
    assert (match.sheet.part, match.reason) == (part, None)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100",
        "NVIDIA H100 SXM5 64GB",
        "NVIDIA H100L 94GB HBM3",
        "NVIDIA H800",
        "NVIDIA H20-3e",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100X",
        "NVIDIA A800-SXM4-80GB",
        "NVIDIA L40",
        "Tesla V100-FHHL-16GB",
        "Tesla V100-SXM3-32GB",
        "AMD Instinct MI300A",
        "AMD Instinct MI300X VF",
        "AMD Instinct MI308X",
        "GRID A100D-80C",
        "",
    ],
)
def test_other_names_have_none(name):
    assert find_sheet(name).sheet is None
    assert find_sheet(name).reason == "no row for this name"


def test_slices_have_none():
    match = find_sheet("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 42 * 10**9, 60)
    assert match.sheet is None
    assert match.reason == "a slice of a device has none"
    # AMD's partitions carry the whole device's name.
    match = find_sheet("AMD Instinct MI300X", 24 * GIB, 38)
    assert match.sheet is None
    assert match.reason == "the device has 26 GB of memory, MI300X has 192 GB"
    match = find_sheet("AMD Instinct MI300X", 192 * GIB, 38)
    assert match.sheet is None
    assert match.reason == "the device shows 38 multiprocessors, MI300X has 304"


def test_power_that_is_limited_below_the_sheets_is_not_passed_over():
    match = find_sheet("NVIDIA H200", power_limit_w=450.0)
    assert match.sheet is None
    assert match.reason == "the device's power is limited to 450 W, the figures are for 700 W"
    assert find_sheet("NVIDIA H200", power_limit_w=700.0).reason is None
    unknown = find_sheet("NVIDIA H200")
    assert unknown.sheet is not None
    assert unknown.reason == "the device's power limit is not known"


PER_CLOCK = {
    # Dense FLOP of a multiprocessor in a clock: fp32, and fp16 of its tensor or matrix cores.
    "V100": (128, 1024),
    "A100": (128, 2048),
    "L40S": (256, 1024),
    "H100": (256, 4096),
    "H200": (256, 4096),
    "HGX B200": (256, 8192),
    "MI300X": (256, 2048),
}


@pytest.mark.parametrize("name", sheets())
def test_figures_are_dense(name):
    """Rates over what the silicon does in a clock are clocks; with sparsity they would double."""
    sheet = sheets()[name]
    found = [rates for part, rates in PER_CLOCK.items() if sheet.part.startswith(part)]
    if not found:
        assert sheet.part == "H20 96GB"  # Its rates are held below what its silicon does.
        return
    fp32, half = found[0]
    for arithmetic, per_clock in (("fp32", fp32), ("fp16", half)):
        clock_hz = sheet.flops_per_s[arithmetic] / (per_clock * sheet.multiprocessors)
        assert 1.3e9 < clock_hz < 2.6e9
    assert sheet.flops_per_s.get("bf16", sheet.flops_per_s["fp16"]) == sheet.flops_per_s["fp16"]
    if "tf32" in sheet.flops_per_s:
        assert sheet.flops_per_s["tf32"] == pytest.approx(sheet.flops_per_s["fp16"] / 2, rel=0.03)


@pytest.mark.parametrize("name", sheets())
def test_rows_are_whole(name):
    sheet = sheets()[name]
    assert sheet.source
    assert 1e12 > sheet.memory_bytes > 1e10
    assert 1e13 > sheet.memory_bytes_per_s > 5e11
    assert (sheet.link is None) == (sheet.link_bytes_per_s is None)
    # What a part does not compute in is absent, not 0: V100 has neither bf16 nor tf32.
    assert ("bf16" in sheet.flops_per_s) == ("V100" not in sheet.part)
    assert min(sheet.flops_per_s.values()) > 0
