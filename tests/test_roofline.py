"""The table of GPUs, and the arithmetic of the roofline worked by hand."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from harness import roofline
from harness.roofline import HOST, LINK, MEMORY, Ceilings, Cost, Floor

KEYS = ["h200", "h100", "h100-pcie", "a100-80", "a100-40", "l4", "l40s", "t4", "rtx3090", "rtx4090", "b200"]
H200 = Ceilings(bandwidth=4.0e12, flops={"fp32": 60e12, "bf16": 800e12})
L2 = 60e6


def test_the_table_has_the_documented_names() -> None:
    assert sorted(roofline.keys()) == sorted(KEYS)


@pytest.mark.parametrize(
    ("name", "gib", "key"),
    [
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA H200 NVL", 139.8, None),
        ("NVIDIA GH200 480GB", 95, None),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.75, None),
        ("NVIDIA H100 80GB HBM3", 39, None),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA H100 NVL", 93.1, None),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80"),
        ("NVIDIA A100 80GB PCIe", 79.3, "a100-80"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40"),
        ("A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA L40S", 44.5, "l40s"),
        ("NVIDIA L40", 44.5, None),
        ("Tesla T4", 14.7, "t4"),
        ("NVIDIA GeForce RTX 3090", 23.7, "rtx3090"),
        ("NVIDIA GeForce RTX 3090 Ti", 23.7, None),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", 23.6, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, None),
        ("NVIDIA B200", 178.4, "b200"),
    ],
)
def test_cards_are_told_apart_by_name_and_memory(name: str, gib: float, key: str | None) -> None:
    assert roofline.identify(name, gib * 2**30) == key


def test_an_unknown_key_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'h300'.*h200, h100"):
        roofline.get("h300")


def test_boards_of_one_key_differ_where_they_differ() -> None:
    assert roofline.get("a100-80").ceilings.bandwidth == 2039e9
    pcie = roofline.get("a100-80", "NVIDIA A100 80GB PCIe")
    assert pcie.ceilings.bandwidth == 1935e9 and pcie.ceilings.flops["bf16"] == 312e12
    assert roofline.get("h200", "NVIDIA L4").key == "h200"


@pytest.mark.parametrize("key", KEYS)
def test_no_figure_is_a_sparse_one(key: str) -> None:
    """A dense rate follows from the multiprocessors and a clock that the card can reach; twice it does not."""
    gpu = roofline.get(key)
    flop_per_clock = {  # of one multiprocessor, fp16 with fp32 accumulation: architecture white papers
        (7, 5): 1024, (8, 0): 2048, (8, 6): 512, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192,
    }[gpu.capability]  # fmt: skip
    if key == "rtx4090":
        flop_per_clock = 512
    clock_ghz = gpu.ceilings.flops["fp16"] / (gpu.sms * flop_per_clock) / 1e9
    assert 1.0 < clock_ghz < 2.6
    assert gpu.ceilings.flops.get("bf16", gpu.ceilings.flops["fp16"]) == gpu.ceilings.flops["fp16"]
    if "fp8" in gpu.ceilings.flops:
        assert gpu.ceilings.flops["fp8"] == pytest.approx(2 * gpu.ceilings.flops["fp16"], rel=0.02)
    if "tf32" in gpu.ceilings.flops:
        assert gpu.ceilings.flops["tf32"] == pytest.approx(gpu.ceilings.flops["fp16"] / 2, rel=0.03)
    fp32_clock_ghz = gpu.ceilings.flops["fp32"] / (gpu.sms * (128 if gpu.capability >= (8, 6) else 64) * 2) / 1e9
    assert 1.0 < fp32_clock_ghz < 2.6


@pytest.mark.parametrize("key", KEYS)
def test_every_card_has_a_source(key: str) -> None:
    gpu = roofline.get(key)
    assert "NVIDIA" in gpu.source and gpu.url.startswith("https://")
    assert 1e11 < gpu.ceilings.bandwidth < 1e13 and gpu.l2_bytes > 2**20


def test_floor_by_hand() -> None:
    memory = roofline.floor_seconds(Cost(1e9, 4e9), H200)  # 1 ms of bytes, 17 µs of FLOPs
    assert (memory.seconds, memory.limit) == (pytest.approx(1e-3), MEMORY)
    compute = roofline.floor_seconds(Cost(8e11, 4e8, "bf16"), H200)  # 1 ms of FLOPs, 100 µs of bytes
    assert (compute.seconds, compute.limit) == (pytest.approx(1e-3), "bf16")
    assert roofline.floor_seconds(Cost(8e11, 4e8, "fp8"), H200).seconds == pytest.approx(
        1e-4
    )  # a pipe without a ceiling


def test_the_floor_is_the_largest_of_its_terms() -> None:
    ceilings = Ceilings(4e12, {"bf16": 800e12, "fp32": 60e12}, "made up", link=400e9, host=50e9)
    work = dict(bytes=4e9, link_bytes=200e6, host_bytes=20e6)  # 1 ms, 0.5 ms, 0.4 ms
    assert roofline.floor_seconds(Cost({"bf16": 4e11, "fp32": 6e10}, **work), ceilings) == Floor(1e-3, MEMORY)
    both = roofline.floor_seconds(Cost({"bf16": 4e11, "fp32": 1.2e11}, **work), ceilings)
    assert both == Floor(2e-3, "fp32")  # the tensor cores would take 0.5 ms
    assert roofline.floor_seconds(Cost(0, 0, link_bytes=8e8), ceilings) == Floor(2e-3, LINK)
    assert roofline.floor_seconds(Cost(0, 0, host_bytes=1e8), ceilings) == Floor(2e-3, HOST)
    assert roofline.floor_seconds(Cost(0, 0, host_bytes=1e8), H200).seconds == 0  # without a ceiling it bounds nothing
    assert roofline.throughput(1e-3, Cost(0, 0, link_bytes=4e8), LINK) == "400 GB/s"
    why = roofline.over_roofline(1e-3, Cost(0, 0, link_bytes=8e8), ceilings)
    assert why and "8e+08 bytes over the link is 200 % of the ceiling (400 GB/s, made up)" in why


def test_every_term_has_its_own_margin() -> None:
    """2 % under the floor of memory is an error, though the larger floor of the pipe grants 10 %."""
    cost = Cost({"bf16": 8.0e11}, 3.9e9)  # 1 ms of FLOPs, 0.975 ms of bytes
    assert roofline.over_roofline(0.96e-3, cost, H200) is None
    why = roofline.over_roofline(0.94e-3, cost, H200)
    assert why and "3.9e+09 bytes is 104 % of the ceiling (4000 GB/s, measured)" in why


def test_links_that_were_not_measured_are_those_of_the_data_sheet() -> None:
    datasheet = Ceilings(4.8e12, {"bf16": 989e12}, "some page", link=450e9, host=64e9)
    both = H200.with_links_of(datasheet)
    assert (both.bandwidth, both.flops, both.link, both.host) == (H200.bandwidth, H200.flops, 450e9, 64e9)
    assert roofline.floor_seconds(Cost(0, 0, link_bytes=450e6), both) == Floor(1e-3, LINK)
    why = roofline.over_roofline(0.5e-3, Cost(0, 0, link_bytes=450e6), both)
    assert why and "(450 GB/s, datasheet)" in why
    with_link = dataclasses.replace(H200, link=4e11).with_links_of(datasheet)
    assert [with_link.source_of(name) for name in (MEMORY, LINK, HOST)] == ["measured", "measured", "datasheet"]
    assert H200.with_links_of(None) == H200


def test_a_cost_goes_into_a_record_and_back() -> None:
    cost = Cost({"bf16": 5, "fp32": 7}, 11, link_bytes=13)
    assert cost.to_record() == {"flops": {"bf16": 5, "fp32": 7}, "bytes": 11, "link_bytes": 13}
    assert Cost.from_record(cost.to_record()) == cost and (cost.total_flops, cost.main_pipe) == (12, "fp32")
    assert Cost.from_record({"flops": 3, "bytes": 4, "pipe": "fp8"}) == Cost({"fp8": 3}, 4), "as in schema 1"


def test_percent_of_roofline_by_hand() -> None:
    assert roofline.percent_of_roofline(1.25e-3, Cost(1e9, 4e9), H200) == pytest.approx(80)
    assert roofline.percent_of_roofline(1.25e-3, Cost(0, 0), H200) is None


def over(seconds: float, flops: float, bytes: float, column: str, pipe: str = "fp32") -> str | None:
    return roofline.over_roofline(seconds, Cost(flops, bytes, pipe), H200, column=column, l2_bytes=L2)


def test_a_large_problem_cannot_beat_its_floor() -> None:
    for column in roofline.COLUMNS:
        kept = L2 if column in ("warm", "graph") else 0
        floor = (4e9 - kept) / 4e12
        assert over(floor, 0, 4e9, column) is None
        assert over(floor * 0.985, 0, 4e9, column) is None  # inside the margin for the noise of the ceiling
        assert "the timing or the cost is wrong" in str(over(floor * 0.97, 0, 4e9, column))


def test_a_matrix_product_at_a_higher_clock_is_no_error() -> None:
    floor = 8e14 / H200.flops["bf16"]
    assert over(floor * 0.95, 8e14, 0, "cold", "bf16") is None
    assert over(floor * 0.89, 8e14, 0, "cold", "bf16")


def test_an_overstated_cost_is_caught() -> None:
    honest = 4e9 / 4e12
    assert over(honest, 0, 4e9, "cold") is None
    assert over(honest, 0, 1.1 * 4e9, "cold")


def test_what_fits_in_l2_may_beat_dram_only_as_far_as_l2_explains() -> None:
    fits = 40e6
    floor = fits / 4e12
    assert over(floor / 50, 0, fits, "warm") is None
    assert over(floor / 1.9, 0, fits, "graph") is None
    assert over(floor / 2.1, 0, fits, "graph")
    for column in ("cold", "cupti"):
        assert over(floor, 0, fits, column) is None
        assert over(floor / 1.1, 0, fits, column)


def test_no_column_excuses_more_flops_than_the_pipe_has() -> None:
    for column in roofline.COLUMNS:
        reason = over(0.5e-3, 8e11, 1e6, column, "bf16")
        assert reason and "800 TFLOP/s" in reason and column in reason


def test_an_unknown_column_is_an_error() -> None:
    with pytest.raises(ValueError, match="hot"):
        over(1.0, 0, 1, "hot")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (roofline.gbps(4.2544e12), "4254 GB/s"),
        (roofline.gbps(6.44e10), "64.4 GB/s"),
        (roofline.tflops(7.8249e14), "782 TFLOP/s"),
        (roofline.tflops(1.234e12), "1.23 TFLOP/s"),
        (roofline.microseconds(1.96e-6), "1.96 µs"),
        (roofline.microseconds(0.0321), "32.1 ms"),
        (roofline.rate(8192, 34.4e-6, "rows"), "238 M rows/s"),
        (roofline.rate(5, 1.0, "steps"), "5.00 steps/s"),
        (roofline.throughput(1e-3, Cost(1e9, 4e9), MEMORY), "4000 GB/s"),
        (roofline.throughput(1e-3, Cost(5e11, 4e9, "bf16"), "bf16"), "500 TFLOP/s"),
    ],
)
def test_figures_read_well(text: str, expected: str) -> None:
    assert text == expected


def test_ceilings_survive_a_record() -> None:
    again = Ceilings.from_record(H200.to_record(), "measured")
    assert again is not None and again.bandwidth == H200.bandwidth and dict(again.flops) == dict(H200.flops)
    assert Ceilings.from_record(None, "datasheet") is None


def test_report_and_compare_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from harness import roofline, record, cli\nfrom harness.commands import report, compare\n"
        "from harness.reporting import charts, roofline_charts\n"
        "assert not [m for m in sys.modules if m.startswith(('torch.', 'triton'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
