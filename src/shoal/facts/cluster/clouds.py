"""Cloud instances by name: their devices and network adapters.

From the providers' pages on accelerated instances (AWS EC2 instance types and SageMaker's ``ml.`` names, Google
Cloud's GPU machine types, Azure's ND, NC and NCads series). The network is what devices use between instances: EFA,
InfiniBand or GPUDirect-TCPX if there is one, otherwise whatever the instance has.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.cluster.device import Link

GIGABIT = 1e9 / 8


class Instance(NamedTuple):
    """One cloud machine type."""

    device: str
    devices: int
    nics: int
    gigabits: float  # per adapter
    fabric: str

    @property
    def network(self) -> Link:
        latency = {"InfiniBand": 5e-6, "EFA": 15e-6}.get(self.fabric, 20e-6)
        kind = f"{self.fabric} {self.gigabits:g} Gb/s"
        return Link(kind=kind, bandwidth=self.gigabits * GIGABIT, latency=latency)


def _aws() -> dict[str, Instance]:
    """EC2. Instances without an EFA usable by devices have Ethernet."""
    found = {
        "p3.2xlarge": Instance("V100-16GB", 1, 1, 10, "Ethernet"),
        "p3.8xlarge": Instance("V100-16GB", 4, 1, 10, "Ethernet"),
        "p3.16xlarge": Instance("V100-16GB", 8, 1, 25, "Ethernet"),
        "p3dn.24xlarge": Instance("V100-32GB", 8, 1, 100, "EFA"),
        "p4d.24xlarge": Instance("A100-40GB", 8, 4, 100, "EFA"),
        "p4de.24xlarge": Instance("A100-80GB", 8, 4, 100, "EFA"),
        "p5.4xlarge": Instance("H100", 1, 1, 100, "EFA"),
        "p5.48xlarge": Instance("H100", 8, 32, 100, "EFA"),
        "p5e.48xlarge": Instance("H200", 8, 32, 100, "EFA"),
        "p5en.48xlarge": Instance("H200", 8, 16, 200, "EFA"),
        "p6-b200.48xlarge": Instance("B200", 8, 8, 400, "EFA"),
        "p6-b300.48xlarge": Instance("B300", 8, 16, 400, "EFA"),
        "p6e-gb200.36xlarge": Instance("GB200", 4, 4, 400, "EFA"),
        "g4dn.12xlarge": Instance("T4", 4, 1, 50, "Ethernet"),
        "g4dn.metal": Instance("T4", 8, 1, 100, "Ethernet"),
        "g5.12xlarge": Instance("A10G", 4, 1, 40, "Ethernet"),
        "g5.24xlarge": Instance("A10G", 4, 1, 50, "Ethernet"),
        "g5.48xlarge": Instance("A10G", 8, 1, 100, "EFA"),
        "g6.12xlarge": Instance("L4", 4, 1, 40, "Ethernet"),
        "g6.24xlarge": Instance("L4", 4, 1, 50, "Ethernet"),
        "g6.48xlarge": Instance("L4", 8, 1, 100, "EFA"),
        "g6e.12xlarge": Instance("L40S", 4, 1, 100, "EFA"),
        "g6e.24xlarge": Instance("L40S", 4, 1, 200, "EFA"),
        "g6e.48xlarge": Instance("L40S", 8, 4, 100, "EFA"),
    }
    # Sizes with one device, by their network's burst rate.
    for family, device, sizes in (
        ("g4dn", "T4", {"xlarge": 25, "2xlarge": 25, "4xlarge": 25, "8xlarge": 50, "16xlarge": 50}),
        ("g5", "A10G", {"xlarge": 10, "2xlarge": 10, "4xlarge": 25, "8xlarge": 25, "16xlarge": 25}),
        ("g6", "L4", {"xlarge": 10, "2xlarge": 10, "4xlarge": 25, "8xlarge": 25, "16xlarge": 25}),
        ("g6e", "L40S", {"xlarge": 20, "2xlarge": 20, "4xlarge": 20, "8xlarge": 25, "16xlarge": 35}),
    ):
        found |= {
            f"{family}.{size}": Instance(device, 1, 1, rate, "Ethernet") for size, rate in sizes.items()
        }
    return found


def _google() -> dict[str, Instance]:
    few = {1: 24, 2: 32, 4: 50, 8: 100}
    found = {f"a2-highgpu-{n}g": Instance("A100-40GB", n, 1, rate, "Ethernet") for n, rate in few.items()}
    found |= {f"a2-ultragpu-{n}g": Instance("A100-80GB", n, 1, rate, "Ethernet") for n, rate in few.items()}
    found |= {
        f"a3-highgpu-{n}g": Instance("H100", n, 1, rate, "Ethernet")
        for n, rate in {1: 25, 2: 50, 4: 100}.items()
    }
    found |= {
        f"g2-standard-{size}": Instance("L4", n, 1, rate, "Ethernet")
        for size, n, rate in (
            (4, 1, 10),
            (8, 1, 16),
            (12, 1, 16),
            (16, 1, 32),
            (32, 1, 32),
            (24, 2, 32),
            (48, 4, 50),
            (96, 8, 100),
        )
    }
    return found | {
        "a2-megagpu-16g": Instance("A100-40GB", 16, 1, 100, "Ethernet"),
        "a3-highgpu-8g": Instance("H100", 8, 4, 200, "TCPX"),
        "a3-edgegpu-8g": Instance("H100", 8, 4, 100, "TCPX"),
        "a3-megagpu-8g": Instance("H100", 8, 8, 200, "TCPX"),
        "a3-ultragpu-8g": Instance("H200", 8, 8, 400, "Ethernet"),
        "a4-highgpu-8g": Instance("B200", 8, 8, 400, "Ethernet"),
        "a4x-highgpu-4g": Instance("GB200", 4, 4, 400, "Ethernet"),
    }


def _azure() -> dict[str, Instance]:
    found = {
        "nd40rs_v2": Instance("V100-32GB", 8, 1, 100, "InfiniBand"),
        "nd96asr_v4": Instance("A100-40GB", 8, 8, 200, "InfiniBand"),
        "nd96amsr_a100_v4": Instance("A100-80GB", 8, 8, 200, "InfiniBand"),
        "nd96isr_h100_v5": Instance("H100", 8, 8, 400, "InfiniBand"),
        "nd96isr_h200_v5": Instance("H200", 8, 8, 400, "InfiniBand"),
        "nd96isr_mi300x_v5": Instance("MI300X", 8, 8, 400, "InfiniBand"),
        "nd128isr_ndr_gb200_v6": Instance("GB200", 4, 4, 400, "InfiniBand"),
        "nd128isr_gb200_v6": Instance("GB200", 4, 4, 400, "InfiniBand"),
        "nc24ads_a100_v4": Instance("A100-PCIe-80GB", 1, 1, 20, "Ethernet"),
        "nc48ads_a100_v4": Instance("A100-PCIe-80GB", 2, 1, 40, "Ethernet"),
        "nc96ads_a100_v4": Instance("A100-PCIe-80GB", 4, 1, 80, "Ethernet"),
        "nc40ads_h100_v5": Instance("H100-NVL", 1, 1, 40, "Ethernet"),
        "nc80adis_h100_v5": Instance("H100-NVL", 2, 1, 80, "Ethernet"),
        "nc4as_t4_v3": Instance("T4", 1, 1, 8, "Ethernet"),
        "nc8as_t4_v3": Instance("T4", 1, 1, 8, "Ethernet"),
        "nc16as_t4_v3": Instance("T4", 1, 1, 8, "Ethernet"),
        "nc64as_t4_v3": Instance("T4", 4, 1, 32, "Ethernet"),
    }
    return {f"standard_{name}": one for name, one in found.items()}


INSTANCES: dict[str, Instance] = {**_aws(), **_google(), **_azure()}


def find(name: str) -> Instance | None:
    """By name, in any case, with or without SageMaker's ``ml.`` and Azure's ``Standard_``."""
    words = name.strip().lower().removeprefix("ml.")
    return INSTANCES.get(words) or INSTANCES.get(f"standard_{words}")


def relatives(name: str) -> list[str]:
    """The instances of the same family, for an unknown name."""
    family = _family(name.strip().lower().removeprefix("ml."))
    return [known for known in INSTANCES if _family(known) == family]


def _family(name: str) -> str:
    """``p4d`` of ``p4d.24xlarge``, ``a3-highgpu`` of ``a3-highgpu-8g``."""
    return name.split(".")[0] if "." in name else name.rpartition("-")[0] or name
