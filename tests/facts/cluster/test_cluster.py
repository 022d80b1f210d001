"""Clusters as people write them, and what they are told when they write them wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.facts.cluster import notation
from shoal.facts.cluster.devices import DEVICES, Link
from shoal.facts.problem import BadInput


@pytest.mark.parametrize(
    ("text", "canonical", "nodes", "devices_per_node", "fast_domain"),
    [
        ("8xH100", "8xH100", 1, 8, 8),
        ("4xh100-sxm", "4xH100", 1, 4, 4),
        ("16384xH100", "16384xH100", 2048, 8, 8),
        ("2x8xA100-80GB", "16xA100-80GB", 2, 8, 8),
        ("2x4xA100", "2x4xA100-80GB", 2, 4, 4),
        ("1x16xH100", "1x16xH100", 1, 16, 8),
        ("4xcpu", "4xcpu", 1, 4, 1),
        ("4096xcpu", "4096xcpu", 1, 4096, 1),
        ("2x4xcpu", "2x4xcpu", 2, 4, 1),
        ("72xGB200", "72xGB200", 18, 4, 72),
        ("8xgb200", "8xGB200", 2, 4, 8),
        ("128xGB200", "128xGB200", 32, 4, 72),
        (" 8 X rtx4090 ", "8xRTX4090", 1, 8, 1),
    ],
)
def test_notation(text: str, canonical: str, nodes: int, devices_per_node: int, fast_domain: int) -> None:
    cluster = notation.find(text)
    assert str(cluster) == canonical
    assert cluster.name == text.strip()
    assert (cluster.nodes, cluster.devices_per_node) == (nodes, devices_per_node)
    assert cluster.devices == nodes * devices_per_node
    assert cluster.fast_domain == fast_domain


SPELLINGS = [name for device in DEVICES for name in (device.name, *device.aliases)]


@given(nodes=st.integers(1, 5000), size=st.sampled_from([1, 2, 4, 8]), spelling=st.sampled_from(SPELLINGS))
def test_what_it_prints_it_reads_back(nodes: int, size: int, spelling: str) -> None:
    cluster = notation.find(f"{nodes}x{size}x{spelling.upper()}")
    printed = str(cluster)
    again = notation.find(printed)
    assert again == cluster.model_copy(update={"name": printed})
    assert str(again) == printed


@given(text=st.text(alphabet="0123456789xX .-+_,H10AabcGpu×", max_size=16))
def test_any_text_is_a_cluster_or_bad_input(text: str) -> None:
    try:
        assert notation.find(text).devices > 0
    except BadInput as error:
        assert all(problem.fix for problem in error.problems)


@pytest.mark.parametrize(
    ("text", "fixes"),
    [
        ("", ["8xH100"]),
        ("eight H100s", ["8xH100"]),
        ("H100", ["1xH100"]),
        ("8x", ["known: A100-40GB"]),
        ("8xH10", ["did you mean 'H100'?"]),
        ("0xH100", ["from 1"]),
        ("-8xH100", ["from 1"]),
        ("2.5xH100", ["a whole number"]),
        ("2x0xH100", ["from 1"]),
        ("0x-1xH10", ["from 1", "from 1", "did you mean 'H100'?"]),
        ("9" * 5000 + "xH100", ["to 10000000"]),
        ("8000000x8xH100", ["at most 10000000"]),
        ("12xH100", ["8xH100 or 16xH100; for nodes of another size say so: 2x6xH100"]),
        ("13xH100", ["8xH100 or 16xH100; for nodes of another size say so: 13x1xH100"]),
        ("1x12xH100", ["divide 8 or are a multiple"]),
        ("nowhere.toml", ["8xH100"]),
    ],
)
def test_bad_text_names_every_problem_with_its_fix(text: str, fixes: list[str]) -> None:
    with pytest.raises(BadInput) as caught:
        notation.find(text)
    problems = caught.value.problems
    assert len(problems) == len(fixes)
    for problem, fix in zip(problems, fixes, strict=True):
        assert fix in problem.fix


def write(directory: Path, text: str) -> str:
    path = directory / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_changes_what_it_names_and_keeps_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path, 'device = "h100"\nnodes = 4\nhost_memory = 2e12\n[network]\nbandwidth = 25e9\n')
    cluster = notation.find(path)
    plain = notation.find("32xH100")
    assert cluster.devices == 32
    assert cluster.host_memory == 2 * 10**12
    assert cluster.network.bandwidth == 25e9
    assert cluster.network.latency == plain.network.latency
    assert cluster.fast == plain.fast
    assert str(cluster) == path
    assert notation.find(str(cluster)) == cluster


def test_a_file_that_says_what_the_catalogue_says_prints_as_notation(tmp_path: Path) -> None:
    assert str(notation.find(write(tmp_path, 'device = "H100"\nnodes = 2\n'))) == "16xH100"


def test_a_file_describes_a_device_of_its_own(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        nodes = 2
        devices_per_node = 4
        [device]
        name = "X1"
        memory_bytes = 64e9
        peaks = {bf16 = 500e12}
        [fast]
        bandwidth = 200e9
        latency = 2e-6
        """,
    )
    cluster = notation.find(path)
    assert cluster.device.name == "X1"
    assert cluster.device.memory_bytes == 64 * 10**9
    assert cluster.device.peak("bf16") == 500e12
    assert cluster.fast == Link(kind="described by the user", bandwidth=200e9, latency=2e-6)
    assert cluster.fast_domain == 4
    assert str(cluster) == path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [("no device", 'device = "H100"')]),
        ('device = "H10"', [("no device 'H10'", "did you mean 'H100'?")]),
        ('device = "H100"\nnode = 2', [("unknown key node", "did you mean 'nodes'?")]),
        (
            'device = "H100"\n[fast]\nbandwith = 1e9',
            [("unknown key fast.bandwith", "did you mean 'bandwidth'?")],
        ),
        ('device = "H100"\nnodes = 0', [("nodes = 0", "greater than 0")]),
        ('device = "H100"\nnodes = true', [("nodes = True", "valid integer")]),
        ('device = "H100"\n[network]\nbandwidth = inf', [("network.bandwidth = inf", "finite")]),
        (
            'nodes = -1\ntypo = 1\ndevice = "H10"',
            [("no device", "H100"), ("nodes = -1", "greater than 0"), ("unknown key typo", "known: ")],
        ),
        (
            "[device]\nname = 'X1'\nmemory = 1",
            [("device: memory_bytes is missing", "memory_bytes"), ("unknown key memory", "memory_bytes")],
        ),
        ('device = "L40S"\nfast_domain = 8', [("no fast link", "[fast]")]),
        ('device = "L40S"\n[fast]\nbandwidth = 1e9', [("fast.latency is missing", "latency")]),
        ('device = "H100"\nfast_domain = 3', [("domains of 3", "divide 3")]),
        ("device = H100", [("cannot read", "TOML")]),
    ],
)
def test_a_bad_file_names_every_problem_with_its_fix(
    tmp_path: Path, text: str, expected: list[tuple[str, str]]
) -> None:
    with pytest.raises(BadInput) as caught:
        notation.find(write(tmp_path, text))
    problems = caught.value.problems
    assert len(problems) == len(expected)
    for problem, (what, fix) in zip(problems, expected, strict=True):
        assert what in problem.what
        assert fix in problem.fix


def test_a_directory_is_not_a_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").mkdir()
    with pytest.raises(BadInput, match="cannot read"):
        notation.find(str(tmp_path / "cluster.toml"))


def test_local_is_this_machine() -> None:
    cluster = notation.find("LOCAL")
    assert (cluster.name, str(cluster), cluster.nodes) == ("local", "local", 1)
    assert cluster.host_memory is not None
