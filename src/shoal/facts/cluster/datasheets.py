"""The device catalogue: memory, peak rates and links from the vendors' datasheets, each with its source."""

from __future__ import annotations

from shoal.facts.cluster.device import GIB, PCIE4, Device, Link, Precision

PCIE3 = Link(kind="PCIe 3.0 x16", bandwidth=15.75e9, latency=5e-6)
PCIE5 = Link(kind="PCIe 5.0 x16", bandwidth=63e9, latency=5e-6)
NVLINK2 = Link(kind="NVLink 2", bandwidth=150e9, latency=3e-6)
NVLINK3 = Link(kind="NVLink 3", bandwidth=300e9, latency=3e-6)
NVLINK4 = Link(kind="NVLink 4", bandwidth=450e9, latency=3e-6)
NVLINK5 = Link(kind="NVLink 5", bandwidth=900e9, latency=3e-6)
# The export versions: 8 of 12, or of 18, links.
NVLINK_400 = Link(kind="NVLink, 400 GB/s", bandwidth=200e9, latency=3e-6)
# Between two neighbouring cards.
NVLINK_BRIDGE = Link(kind="NVLink bridge, 600 GB/s", bandwidth=300e9, latency=3e-6)
EDR = Link(kind="InfiniBand EDR 100 Gb/s", bandwidth=12.5e9, latency=5e-6)
HDR = Link(kind="InfiniBand HDR 200 Gb/s", bandwidth=25e9, latency=5e-6)
NDR = Link(kind="InfiniBand NDR 400 Gb/s", bandwidth=50e9, latency=5e-6)
XDR = Link(kind="InfiniBand XDR 800 Gb/s", bandwidth=100e9, latency=5e-6)
EFA_100 = Link(kind="EFA 100 Gb/s", bandwidth=12.5e9, latency=15e-6)
ETHERNET_400 = Link(kind="Ethernet 400 Gb/s", bandwidth=50e9, latency=10e-6)
ETHERNET_100 = Link(kind="Ethernet 100 Gb/s", bandwidth=12.5e9, latency=20e-6)


def _usable(gibibytes: float) -> int:
    """Bytes of the driver's total, known to two decimals of a GiB, rounded down to whole MiB."""
    return int(gibibytes * 1024) * 2**20


def _teraflops(
    fp64: float, fp32: float, tf32: float | None, half: float, fp8: float | None = None
) -> dict[Precision, float]:
    """Peaks as printed in datasheets. Devices with both bf16 and fp16 have the same rate for them."""
    rates: dict[Precision, float] = {"fp64": fp64, "fp32": fp32, "bf16": half, "fp16": half}
    if tf32 is not None:
        rates["tf32"] = tf32
    if fp8 is not None:
        rates["fp8"] = fp8
    return {precision: float(round(rate * 1e12)) for precision, rate in rates.items()}


_MEMORY = "Memory: total that CUDA or HIP shows a program (torch reports), lower than nominal."
_NETWORK_DGX = "Network: one adapter a device, as in the vendor's reference system."
_NETWORK_ASSUMED = "Network: assumed, these cards come in many servers."


def _first_tensor_cores(fp64: float, fp32: float, fp16: float) -> dict[Precision, float]:
    """Before Ampere: tensor cores for fp16, none for bf16, tf32 or fp8."""
    return {"fp64": fp64 * 1e12, "fp32": fp32 * 1e12, "fp16": fp16 * 1e12}


_A100_PEAKS = _teraflops(19.5, 19.5, 156, 312)
_HOPPER_SXM_PEAKS = _teraflops(66.9, 66.9, 494.7, 989.4, 1978.9)
_MI300_PEAKS = _teraflops(163.4, 163.4, 653.7, 1307.4, 2614.9)
# All seven links together; a pair of devices gets a seventh.
INFINITY_FABRIC_3 = Link(kind="Infinity Fabric, 7 links", bandwidth=448e9, latency=3e-6)

CPU = Device(
    name="cpu",
    memory_bytes=8 * GIB,
    peaks={"fp64": 40e9, "fp32": 80e9},
    memory_bandwidth=10e9,
    host_link=Link(kind="loopback", bandwidth=2e9, latency=50e-6),
    devices_per_node=None,
    source="No datasheet. Assumed: one core at 2.5 GHz with two 256-bit FMA pipes, 8 GiB and 10 GB/s of "
    "the machine's memory, gloo over loopback. 'local' looks at the machine itself.",
)

DEVICES: tuple[Device, ...] = (
    Device(
        name="A100-40GB",
        aliases=("a100-sxm4-40gb", "a100-sxm-40gb"),
        memory_bytes=_usable(39.49),
        peaks=_A100_PEAKS,
        memory_bandwidth=1555e9,
        fast=NVLINK3,
        fast_domain=8,
        host_link=PCIE4,
        network=HDR,
        power=400,
        source=f"NVIDIA A100 datasheet and DGX A100 datasheet. {_MEMORY} {_NETWORK_DGX}",
    ),
    Device(
        name="A100-80GB",
        aliases=("a100", "a100-sxm", "a100-sxm4-80gb", "a100-sxm-80gb"),
        memory_bytes=_usable(79.15),
        peaks=_A100_PEAKS,
        memory_bandwidth=2039e9,
        fast=NVLINK3,
        fast_domain=8,
        host_link=PCIE4,
        network=HDR,
        power=400,
        source=f"NVIDIA A100 80GB datasheet and DGX A100 datasheet. {_MEMORY} {_NETWORK_DGX}",
    ),
    Device(
        name="A100-PCIe-80GB",
        aliases=("a100-pcie", "a100-80gb-pcie"),
        memory_bytes=_usable(79.15),
        peaks=_A100_PEAKS,
        memory_bandwidth=1935e9,
        host_link=PCIE4,
        nics=4,
        network=HDR,
        power=300,
        source=f"NVIDIA A100 80GB PCIe datasheet, without NVLink bridges. {_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="H100",
        aliases=("h100-80gb", "h100-sxm", "h100-sxm5", "h100-sxm-80gb", "h100-sxm5-80gb", "h100-80gb-hbm3"),
        memory_bytes=_usable(79.10),
        peaks=_HOPPER_SXM_PEAKS,
        memory_bandwidth=3.35e12,
        fast=NVLINK4,
        fast_domain=8,
        host_link=PCIE5,
        network=NDR,
        power=700,
        source="NVIDIA H100 datasheet, H100 architecture whitepaper (dense, SXM5), DGX H100 datasheet. "
        f"{_MEMORY} {_NETWORK_DGX}",
    ),
    Device(
        name="H100-96GB",
        aliases=("h100-sxm-96gb", "h100-sxm5-96gb", "h100-96gb-hbm2e", "h100-96gb-hbm3"),
        memory_bytes=_usable(95.00),
        peaks=_HOPPER_SXM_PEAKS,
        memory_bandwidth=2.4e12,
        fast=NVLINK4,
        fast_domain=8,
        host_link=PCIE5,
        network=NDR,
        power=500,
        source="torchtitan benchmarks/llama3_h100_202412_torchtitan.md: the variant of Meta's Grand Teton, "
        "96 GB HBM2e at 2.4 TB/s, run at a 500 W limit (700 W board), 400 Gb/s a device. Peaks: H100 "
        f"architecture whitepaper, at 700 W. {_MEMORY}",
    ),
    Device(
        name="H100-PCIe",
        aliases=("h100-pcie-80gb", "h100-80gb-pcie"),
        memory_bytes=_usable(79.10),
        peaks=_teraflops(51.2, 51.2, 378, 756, 1513),
        memory_bandwidth=2.039e12,
        host_link=PCIE5,
        nics=4,
        network=NDR,
        power=350,
        source=f"NVIDIA H100 PCIe product brief, without NVLink bridges. {_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="H200",
        aliases=("h200-sxm", "h200-141gb", "h200-sxm-141gb"),
        memory_bytes=143155 * 2**20,
        peaks=_HOPPER_SXM_PEAKS,
        memory_bandwidth=4.8e12,
        fast=NVLINK4,
        fast_domain=8,
        host_link=PCIE5,
        network=NDR,
        power=700,
        source="NVIDIA H200 datasheet, DGX H200 datasheet. Memory: as torch reports it under driver 580. "
        f"{_NETWORK_DGX}",
    ),
    Device(
        name="B200",
        aliases=("b200-sxm", "b200-180gb", "b200-192gb"),
        memory_bytes=_usable(178.35),
        peaks=_teraflops(37, 75, 1100, 2250, 4500),
        memory_bandwidth=7.7e12,
        fast=NVLINK5,
        fast_domain=8,
        host_link=PCIE5,
        network=NDR,
        power=1000,
        source="NVIDIA Blackwell datasheet (HGX B200, dense), DGX B200 datasheet; memory bandwidth as later "
        f"editions and the driver's bus width give it, announced as 8 TB/s. {_MEMORY} {_NETWORK_DGX}",
    ),
    Device(
        name="GB200",
        aliases=("gb200-nvl72", "gb200-186gb"),
        memory_bytes=_usable(184.31),
        peaks=_teraflops(40, 80, 1250, 2500, 5000),
        memory_bandwidth=8e12,
        fast=NVLINK5,
        fast_domain=72,
        host_link=Link(kind="NVLink-C2C, half of a Grace CPU's", bandwidth=225e9, latency=2e-6),
        network=NDR,
        devices_per_node=4,
        power=1200,
        source="NVIDIA GB200 NVL72 datasheet: the rack's figures over its 72 GPUs, halved where they count "
        f"sparsity. A device is one GPU, a node one compute tray. {_MEMORY} {_NETWORK_DGX}",
    ),
    Device(
        name="L40S",
        aliases=("l40s-48gb",),
        memory_bytes=_usable(44.39),
        peaks=_teraflops(1.43, 91.6, 183, 362, 733),
        memory_bandwidth=864e9,
        host_link=PCIE4,
        nics=4,
        network=ETHERNET_400,
        power=350,
        source="NVIDIA L40S datasheet (fp64: 1/64 of fp32, Ada architecture whitepaper). "
        f"{_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="RTX4090",
        aliases=("4090", "rtx-4090", "geforce-rtx-4090"),
        memory_bytes=_usable(23.52),
        peaks=_teraflops(1.29, 82.6, 82.6, 165.2, 330.3),
        memory_bandwidth=1008e9,
        host_link=PCIE4,
        peer_access=False,
        nics=1,
        network=ETHERNET_100,
        power=450,
        source="NVIDIA Ada architecture whitepaper, rates with fp32 accumulation, which training needs (half "
        f"of those with fp16 accumulation). {_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="MI300X",
        aliases=("instinct-mi300x", "instinct-mi300x-oam"),
        memory_bytes=_usable(191.69),
        peaks=_MI300_PEAKS,
        memory_bandwidth=5.3e12,
        fast=INFINITY_FABRIC_3,
        fast_domain=8,
        host_link=PCIE5,
        network=ETHERNET_400,
        power=750,
        source="AMD Instinct MI300X data sheet (matrix rates) and platform data sheet. "
        f"{_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="V100-32GB",
        aliases=("v100", "v100-sxm2", "v100-sxm2-32gb", "tesla-v100-sxm2-32gb", "v100-sxm3-32gb"),
        memory_bytes=_usable(31.73),
        peaks=_first_tensor_cores(7.8, 15.7, 125),
        memory_bandwidth=900e9,
        fast=NVLINK2,
        fast_domain=8,
        host_link=PCIE3,
        nics=4,
        network=EDR,
        power=300,
        source="NVIDIA V100 datasheet (SXM2) and DGX-1 datasheet: 4 adapters of 100 Gb/s for 8 devices, whose "
        f"links are a mesh, not a switch. {_MEMORY}",
    ),
    Device(
        name="V100-16GB",
        aliases=("v100-sxm2-16gb", "tesla-v100-sxm2-16gb"),
        memory_bytes=_usable(15.77),
        peaks=_first_tensor_cores(7.8, 15.7, 125),
        memory_bandwidth=900e9,
        fast=NVLINK2,
        fast_domain=8,
        host_link=PCIE3,
        nics=4,
        network=EDR,
        power=300,
        source=f"NVIDIA V100 datasheet (SXM2) and DGX-1 datasheet, as the 32 GB one. {_MEMORY}",
    ),
    Device(
        name="T4",
        aliases=("tesla-t4", "t4-16gb"),
        memory_bytes=_usable(14.56),
        peaks=_first_tensor_cores(0.254, 8.1, 65),
        memory_bandwidth=320e9,
        host_link=PCIE3,
        nics=1,
        network=ETHERNET_100,
        power=70,
        source=f"NVIDIA T4 datasheet (fp64: 1/32 of fp32, Turing whitepaper). {_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="L4",
        aliases=("l4-24gb",),
        memory_bytes=_usable(22.03),
        peaks=_teraflops(0.47, 30.3, 60, 121, 242),
        memory_bandwidth=300e9,
        host_link=PCIE4,
        nics=1,
        network=ETHERNET_100,
        power=72,
        source="NVIDIA L4 datasheet, halved where it counts sparsity (fp64: 1/64 of fp32, Ada whitepaper). "
        f"{_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="A10G",
        aliases=("a10g-24gb",),
        memory_bytes=_usable(22.06),
        peaks=_teraflops(0.55, 35, 35, 70),
        memory_bandwidth=600e9,
        host_link=PCIE4,
        nics=1,
        network=ETHERNET_100,
        power=300,
        source="NVIDIA A10G datasheet for AWS, without sparsity (fp64: 1/64 of fp32, Ampere GA102 whitepaper). "
        f"{_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="A6000",
        aliases=("rtx-a6000", "rtxa6000", "a6000-48gb"),
        memory_bytes=_usable(47.43),
        peaks=_teraflops(0.6, 38.7, 77.4, 154.8),
        memory_bandwidth=768e9,
        host_link=PCIE4,
        nics=1,
        network=ETHERNET_100,
        power=300,
        source="NVIDIA RTX A6000 datasheet and Ampere GA102 whitepaper, without sparsity and NVLink bridges. "
        f"{_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="RTX3090",
        aliases=("3090", "rtx-3090", "geforce-rtx-3090"),
        memory_bytes=_usable(23.68),
        peaks=_teraflops(0.56, 35.6, 35.6, 71),
        memory_bandwidth=936e9,
        host_link=PCIE4,
        peer_access=False,
        nics=1,
        network=ETHERNET_100,
        power=350,
        source="NVIDIA Ampere GA102 whitepaper, rates with fp32 accumulation, without NVLink bridges; GeForce "
        f"drivers copy between cards through the host. {_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="RTX5090",
        aliases=("5090", "rtx-5090", "geforce-rtx-5090"),
        memory_bytes=_usable(31.35),
        peaks=_teraflops(1.64, 104.8, 104.8, 209.5, 419),
        memory_bandwidth=1792e9,
        host_link=PCIE5,
        peer_access=False,
        nics=1,
        network=ETHERNET_100,
        power=575,
        source="NVIDIA RTX Blackwell whitepaper, rates with fp32 accumulation; GeForce drivers copy between cards "
        f"through the host. {_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="H20",
        aliases=("h20-96gb", "h20-sxm"),
        memory_bytes=_usable(95.0),
        peaks=_teraflops(1, 44, 74, 148, 296),
        memory_bandwidth=4e12,
        fast=NVLINK4,
        fast_domain=8,
        host_link=PCIE5,
        network=NDR,
        power=400,
        source=f"NVIDIA H20 product brief (96 GB HBM3, HGX). {_MEMORY} {_NETWORK_DGX}",
    ),
    Device(
        name="H800",
        aliases=("h800-80gb", "h800-sxm", "h800-sxm5"),
        memory_bytes=_usable(79.10),
        peaks=_HOPPER_SXM_PEAKS | {"fp64": 1e12},
        memory_bandwidth=3.35e12,
        fast=NVLINK_400,
        fast_domain=8,
        host_link=PCIE5,
        network=NDR,
        power=700,
        source="NVIDIA H800 datasheet: an H100 with NVLink at 400 GB/s and fp64 at 1 TFLOP/s. Network: 8 adapters of "
        f"400 Gb/s a node, as in DeepSeek-V3's report. {_MEMORY}",
    ),
    Device(
        name="A800",
        aliases=("a800-80gb", "a800-sxm", "a800-sxm4-80gb"),
        memory_bytes=_usable(79.15),
        peaks=_A100_PEAKS,
        memory_bandwidth=2039e9,
        fast=NVLINK_400,
        fast_domain=8,
        host_link=PCIE4,
        network=HDR,
        power=400,
        source=f"NVIDIA A800 80GB datasheet: an A100 with NVLink at 400 GB/s. {_MEMORY} {_NETWORK_DGX}",
    ),
    Device(
        name="H100-NVL",
        aliases=("h100-nvl-94gb", "h100-94gb"),
        memory_bytes=_usable(93.0),
        peaks=_teraflops(60, 60, 417.5, 835.5, 1671),
        memory_bandwidth=3.9e12,
        fast=NVLINK_BRIDGE,
        fast_domain=2,
        host_link=PCIE5,
        nics=4,
        network=NDR,
        power=400,
        source="NVIDIA H100 NVL datasheet, halved where it counts sparsity; bridges join pairs. "
        f"{_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="GH200",
        aliases=("gh200-96gb", "gh200-480gb"),
        memory_bytes=_usable(94.5),
        peaks=_HOPPER_SXM_PEAKS,
        memory_bandwidth=4e12,
        host_link=Link(kind="NVLink-C2C", bandwidth=450e9, latency=2e-6),
        network=NDR,
        devices_per_node=1,
        power=900,
        source="NVIDIA GH200 Grace Hopper datasheet (96 GB HBM3), power with its CPU. One a node, with one adapter. "
        f"{_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="B300",
        aliases=("b300-sxm", "b300-sxm6-ac", "b300-288gb"),
        memory_bytes=_usable(267.0),
        peaks=_teraflops(1.3, 77, 1125, 2250, 4500),
        memory_bandwidth=8e12,
        fast=NVLINK5,
        fast_domain=8,
        host_link=PCIE5,
        network=XDR,
        power=1100,
        source="NVIDIA Blackwell Ultra datasheet (HGX B300: the board's figures over its 8 GPUs, dense), DGX B300 "
        f"datasheet: one adapter of 800 Gb/s a device. {_MEMORY}",
    ),
    Device(
        name="MI325X",
        aliases=("instinct-mi325x", "instinct-mi325x-oam"),
        memory_bytes=_usable(255.69),
        peaks=_MI300_PEAKS,
        memory_bandwidth=6e12,
        fast=INFINITY_FABRIC_3,
        fast_domain=8,
        host_link=PCIE5,
        network=ETHERNET_400,
        power=1000,
        source=f"AMD Instinct MI325X data sheet (matrix rates). {_MEMORY} {_NETWORK_ASSUMED}",
    ),
    Device(
        name="MI355X",
        aliases=("instinct-mi355x", "instinct-mi355x-oam"),
        memory_bytes=_usable(287.5),
        peaks=_teraflops(78.6, 157.3, None, 2516.6, 5033.2),
        memory_bandwidth=8e12,
        fast=Link(kind="Infinity Fabric, 7 links", bandwidth=537.6e9, latency=3e-6),
        fast_domain=8,
        host_link=PCIE5,
        network=ETHERNET_400,
        power=1400,
        source="AMD Instinct MI355X data sheet (matrix rates; it has no units for tf32). "
        f"{_MEMORY} {_NETWORK_ASSUMED}",
    ),
    CPU,
)
