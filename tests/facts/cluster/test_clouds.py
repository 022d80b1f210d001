"""Cloud instances by name: devices that the catalogue has, and networks as the providers state them."""

from __future__ import annotations

import pytest

from shoal.facts.cluster import devices, notation
from shoal.facts.cluster.clouds import INSTANCES, find
from shoal.facts.problem import BadInput


@pytest.mark.parametrize("name", INSTANCES)
def test_every_instance_is_a_cluster_of_one_node(name: str) -> None:
    instance, cluster = INSTANCES[name], notation.find(name)
    assert devices.find(instance.device) == cluster.device
    assert (cluster.nodes, cluster.devices_per_node, cluster.nics) == (1, instance.devices, instance.nics)
    again = notation.find(str(cluster))
    assert again.model_copy(update={"name": name}) == cluster


@pytest.mark.parametrize(
    ("text", "nodes", "devices_there", "device", "gigabits"),
    [
        ("2xml.p4d.24xlarge", 2, 16, "A100-40GB", 400),
        ("p5.48xlarge", 1, 8, "H100", 3200),
        ("4xa3-highgpu-8g", 4, 32, "H100", 800),
        ("a3-ultragpu-8g", 1, 8, "H200", 3200),
        ("8xStandard_ND96isr_H100_v5", 8, 64, "H100", 3200),
        ("2x nd96amsr_a100_v4", 2, 16, "A100-80GB", 1600),
    ],
)
def test_as_the_providers_state_them(
    text: str, nodes: int, devices_there: int, device: str, gigabits: float
) -> None:
    cluster = notation.find(text)
    assert (cluster.nodes, cluster.devices, cluster.device.name) == (nodes, devices_there, device)
    assert cluster.nics * cluster.network.bandwidth * 8 / 1e9 == pytest.approx(gigabits)


def test_names_in_any_case_and_with_or_without_a_prefix() -> None:
    assert find("ML.P5.48xlarge") == find("p5.48xlarge") is not None
    assert find("ND96isr_H100_v5") == find("Standard_ND96isr_H100_v5") is not None
    assert find("p5.49xlarge") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2xp4d.48xlarge", "p4d.24xlarge"),
        ("2x4xp5.48xlarge", "has 8 devices"),
        ("0xp5.48xlarge", "number of instances"),
    ],
)
def test_what_is_wrong_with_one(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        notation.find(text)


@pytest.mark.parametrize(
    ("text", "nics", "bandwidth"),
    [("64xH100@4x200", 4, 25e9), ("8x1xA100@100G", 1, 12.5e9), ("2xp5.48xlarge@16x200", 16, 25e9)],
)
def test_adapters_in_the_notation(text: str, nics: int, bandwidth: float) -> None:
    cluster = notation.find(text)
    assert (cluster.nics, cluster.network.bandwidth) == (nics, bandwidth)
    assert notation.find(str(cluster)).model_copy(update={"name": cluster.name}) == cluster


@pytest.mark.parametrize("text", ["64xH100@", "64xH100@fast", "64xH100@0x200", "64xH100@4x0"])
def test_no_network(text: str) -> None:
    with pytest.raises(BadInput, match="is no network"):
        notation.find(text)
