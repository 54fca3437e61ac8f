"""Peak performance of chips as stated by their vendors, without sparsity, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

__all__ = ["CHIPS", "Chip", "find_chip", "specs"]


class Chip(NamedTuple):
    """Peaks of a chip: TFLOP/s of dense matrix products that accumulate in 32 bits or more.

    Attributes:
        source: the vendor's paper.
        memory: GiB.
        bandwidth: GB/s.
        units: number of multiprocessors, for chips whose partitions have the same name.

    None means that the vendor states no figure.
    """

    source: str
    memory: int
    bandwidth: float | None
    float64: float | None
    float32: float | None
    tf32: float | None
    bfloat16: float | None
    float16: float | None
    float8: float | None = None
    units: int | None = None


# From Hopper on NVIDIA's papers state figures with sparsity only. The rows have half of these figures.
_V100 = "NVIDIA V100 Tensor Core GPU data sheet"
_V100S = "NVIDIA V100S PCIe data sheet"
_T4 = "NVIDIA T4 Tensor Core GPU data sheet"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet: nvidia.com/en-us/data-center/a100"
_A30 = "NVIDIA A30 Tensor Core GPU data sheet: nvidia.com/en-us/data-center/products/a30-gpu"
_A40 = "NVIDIA A40 GPU data sheet: nvidia.com/en-us/data-center/a40"
_A10 = "NVIDIA A10 Tensor Core GPU data sheet: nvidia.com/en-us/data-center/products/a10-gpu"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper, appendices"
_ADA = "NVIDIA Ada GPU architecture whitepaper, appendices"
_ADA_PRO = "NVIDIA Ada GPU architecture whitepaper for professional graphics, appendix"
_L4 = "NVIDIA L4 Tensor Core GPU data sheet: nvidia.com/en-us/data-center/l4"
_L40 = "NVIDIA L40 GPU data sheet: nvidia.com/en-us/data-center/l40"
_L40S = "NVIDIA L40S GPU data sheet: nvidia.com/en-us/data-center/l40s"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet: nvidia.com/en-us/data-center/h100"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet: nvidia.com/en-us/data-center/h200"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip data sheet"
_HGX = "NVIDIA HGX platform, HGX B200, one of 8 GPUs: nvidia.com/en-us/data-center/hgx"
_GB200 = "NVIDIA GB200 NVL72, one of 2 GPUs of a superchip: nvidia.com/en-us/data-center/gb200-nvl72"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper, appendices"
_MI210 = "AMD Instinct MI210 data sheet: amd.com/en/products/accelerators/instinct/mi200/mi210.html"
_MI250X = "AMD Instinct MI250X, one of 2 dies: amd.com/en/products/accelerators/instinct/mi200/mi250x.html"
_MI300A = "AMD Instinct MI300A data sheet: amd.com/en/products/accelerators/instinct/mi300/mi300a.html"
_MI300X = "AMD Instinct MI300X data sheet: amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
_MI325X = "AMD Instinct MI325X data sheet: amd.com/en/products/accelerators/instinct/mi300/mi325x.html"
_MI350X = "AMD Instinct MI350X data sheet: amd.com/en/products/accelerators/instinct/mi350/mi350x.html"
_MI355X = "AMD Instinct MI355X data sheet: amd.com/en/products/accelerators/instinct/mi350/mi355x.html"

CHIPS: Final[Mapping[str, Chip]] = {
    # name that the driver gives, without NVIDIA:
    # source, memory, bandwidth, float64, float32, tf32, bfloat16, float16, float8
    "Tesla V100-SXM2-16GB": Chip(_V100, 16, 900, 7.8, 15.7, None, None, 125),
    "Tesla V100-SXM2-32GB": Chip(_V100, 32, 900, 7.8, 15.7, None, None, 125),
    "Tesla V100-PCIE-16GB": Chip(_V100, 16, 900, 7, 14, None, None, 112),
    "Tesla V100-PCIE-32GB": Chip(_V100, 32, 900, 7, 14, None, None, 112),
    "Tesla V100S-PCIE-32GB": Chip(_V100S, 32, 1134, 8.2, 16.4, None, None, 130),
    # NVIDIA's papers disagree about the bandwidth.
    "Tesla T4": Chip(_T4, 16, None, None, 8.1, None, None, 65),
    "A100-SXM4-40GB": Chip(_A100, 40, 1555, 19.5, 19.5, 156, 312, 312),
    "A100-SXM4-80GB": Chip(_A100, 80, 2039, 19.5, 19.5, 156, 312, 312),
    "A100-PCIE-40GB": Chip(_A100, 40, 1555, 19.5, 19.5, 156, 312, 312),
    "A100 80GB PCIe": Chip(_A100, 80, 1935, 19.5, 19.5, 156, 312, 312),
    "A30": Chip(_A30, 24, 933, 10.3, 10.3, 82, 165, 165),
    "A40": Chip(_A40, 48, 696, None, 37.4, 74.8, 149.7, 149.7),
    "A10": Chip(_A10, 24, 600, None, 31.2, 62.5, 125, 125),
    "RTX A6000": Chip(_GA102, 48, 768, None, 38.7, 77.4, 154.8, 154.8),
    "GeForce RTX 3070": Chip(_GA102, 8, 448, None, 20.3, 20.3, 40.6, 40.6),
    "GeForce RTX 3080": Chip(_GA102, 10, 760, None, 29.8, 29.8, 59.5, 59.5),
    "GeForce RTX 3090": Chip(_GA102, 24, 936, None, 35.6, 35.6, 71, 71),
    "GeForce RTX 3090 Ti": Chip(_ADA, 24, 1008, None, 40, 40, 80, 80),
    # From here on GeForce has two figures for float8, which depend on the accumulator; neither is listed.
    "GeForce RTX 4080": Chip(_ADA, 16, 716.8, None, 48.7, 48.7, 97.5, 97.5),
    "GeForce RTX 4090": Chip(_ADA, 24, 1008, None, 82.6, 82.6, 165.2, 165.2),
    "RTX 6000 Ada Generation": Chip(_ADA_PRO, 48, 960, None, 91.1, 182.1, 364.2, 364.2, 728.5),
    "L4": Chip(_L4, 24, 300, None, 30.3, 60, 121, 121, 242.5),
    "L40": Chip(_L40, 48, 864, None, 90.5, 90.5, 181.05, 181.05, 362),
    "L40S": Chip(_L40S, 48, 864, None, 91.6, 183, 362.05, 362.05, 733),
    "H100 80GB HBM3": Chip(_H100, 80, 3350, 67, 67, 494.5, 989.5, 989.5, 1979),
    "H100 PCIe": Chip(_H100, 80, 2000, 51, 51, 378, 756.5, 756.5, 1513),
    "H100 NVL": Chip(_H100, 94, 3900, 60, 60, 417.5, 835.5, 835.5, 1670.5),
    "H200": Chip(_H200, 141, 4800, 67, 67, 494.5, 989.5, 989.5, 1979),
    "H200 NVL": Chip(_H200, 141, 4800, 60, 60, 417.5, 835.5, 835.5, 1670.5),
    "GH200 480GB": Chip(_GH200, 96, 4000, 67, 67, 494.5, 989.5, 989.5, 1979),
    "B200": Chip(_HGX, 180, 8000, 37, 75, 1125, 2250, 2250, 4500),
    "GB200": Chip(_GB200, 186, 8000, 40, 80, 1250, 2500, 2500, 5000),
    "GeForce RTX 5070": Chip(_BLACKWELL, 12, 672, None, 30.9, 30.9, 61.7, 61.7),
    "GeForce RTX 5070 Ti": Chip(_BLACKWELL, 16, 896, None, 43.9, 43.9, 87.9, 87.9),
    "GeForce RTX 5080": Chip(_BLACKWELL, 16, 960, None, 56.3, 56.3, 112.6, 112.6),
    "GeForce RTX 5090": Chip(_BLACKWELL, 32, 1792, None, 104.8, 104.8, 209.5, 209.5),
    # AMD: figures of the matrix cores. TF32 is left out, because torch's switch alone does not turn it on.
    "AMD Instinct MI210": Chip(_MI210, 64, 1638.4, 45.3, 45.3, None, 181, 181, None, 104),
    "AMD Instinct MI250X": Chip(_MI250X, 64, 1638.4, 47.85, 47.85, None, 191.5, 191.5, None, 110),
    "AMD Instinct MI300A": Chip(_MI300A, 128, 5300, 122.6, 122.6, None, 980.6, 980.6, 1961.2, 228),
    "AMD Instinct MI300X": Chip(_MI300X, 192, 5300, 163.4, 163.4, None, 1307.4, 1307.4, 2614.9, 304),
    "AMD Instinct MI325X": Chip(_MI325X, 256, 6000, 163.4, 163.4, None, 1307.4, 1307.4, 2614.9, 304),
    "AMD Instinct MI350X": Chip(_MI350X, 288, 8000, 72.1, 144.2, None, 2306.9, 2306.9, 4613.7, 256),
    "AMD Instinct MI355X": Chip(_MI355X, 288, 8000, 78.6, 157.3, None, 2516.6, 2516.6, 5033.2, 256),
}


def find_chip(name: str, memory: int, units: int) -> Chip | None:
    """Return the row of a chip by its name, bytes of memory and multiprocessors; None if it has no row.

    Memory and multiprocessors are compared because variants and partitions of a chip may share its name.
    """
    chip = CHIPS.get(name.removeprefix("NVIDIA "))
    # Drivers reserve up to a tenth of the memory.
    if chip is None or chip.units not in (None, units) or not 0.88 < memory / 2**30 / chip.memory < 1.02:
        return None
    return chip


def specs(chip: Chip, uses_tf32: bool | None) -> dict[str, Any]:
    """Return the row in the form of the hook `monitor.device_specs`.

    Args:
        chip: the row.
        uses_tf32: True if products of float32 matrices use TF32. None if only some do: float32 then has no
            single figure and is left out.
    """
    figures = {
        "float64": chip.float64,
        "float32": _float32(chip, uses_tf32),
        "bfloat16": chip.bfloat16,
        "float16": chip.float16,
        "float8": chip.float8,
    }
    peaks = {
        "flops": {dtype: round(figure * 1e12) for dtype, figure in figures.items() if figure is not None},
        "memory": chip.memory * 2**30,
        "source": chip.source,
    }
    return peaks if chip.bandwidth is None else {**peaks, "bandwidth": round(chip.bandwidth * 1e9)}


def _float32(chip: Chip, uses_tf32: bool | None) -> float | None:
    if uses_tf32 is False or (chip.tf32 is None and not chip.source.startswith("AMD")):
        return chip.float32
    return chip.tf32 if uses_tf32 else None
