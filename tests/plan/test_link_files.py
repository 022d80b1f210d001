"""``--links``: what nccl-tests print, and what ``shoal bench comm`` stored, as the planner's links."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.facts import calibration
from shoal.facts.calibration.file import FORMAT, StoredLinks
from shoal.facts.cluster import notation
from shoal.facts.problem import BadInput
from shoal.plan.link_files import read_logs, use_links
from shoal.predict.time.links import Links

SIZES = [2**power for power in range(12, 31, 2)]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    calibration.forget()


def log(
    hosts: list[str],
    bandwidth: float = 300e9,
    latency: float = 40e-6,
    gpu: str = "NVIDIA H100 80GB HBM3",
    op: str = "all_reduce",
    named: bool = True,
) -> str:
    """As nccl-tests 2.13 print it; older ones name neither the operation nor a root. Long times are whole numbers."""
    others = (len(hosts) - 1) / len(hosts)
    share = 2 * others if op == "all_reduce" else others
    lines = [f"# Collective test starting: {op}_perf"] if named else []
    lines += ["# nThread 1 nGpus 1 minBytes 4096 maxBytes 1073741824 step: 4(factor)", "#", "# Using devices"]
    lines += [
        f"#  Rank {rank:2} Group  0 Pid {300 + rank} on {host} device {rank % 8} [0x{rank:02x}] {gpu}"
        for rank, host in enumerate(hosts)
    ]
    root = "    root" if named else ""
    lines += [f"#       size         count      type   redop{root}     time   algbw   busbw #wrong"]
    lines += ["#        (B)    (elements)                               (us)  (GB/s)  (GB/s)"]
    for size in SIZES:
        seconds = latency + share * size / bandwidth
        rate, bus = size / seconds / 1e9, share * size / seconds / 1e9
        word = "sum" if op == "all_reduce" else "none"
        times = f"{seconds * 1e6:.{2 if seconds < 1e-3 else 0}f} {rate:.2f} {bus:.2f}      0"
        lines.append(f"  {size}  {size // 4}  float  {word}  {'-1  ' if named else ''}{times}  {times}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth : 99.1", ""])


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def reached(name: str, ranks: int, stride: int = 1, size: int = 2**33) -> float:
    cluster = notation.find(name)
    ours = Links(cluster, calibration.find(cluster))
    return 2 * (ranks - 1) / ranks * size / ours.seconds("all_reduce", size, ranks, stride)


def test_within_a_node(tmp_path: Path) -> None:
    cluster = notation.find("8xH100")
    use_links(written(tmp_path / "nccl.log", log(["a"] * 8, 400e9, 33e-6)), cluster)
    assert reached("8xH100", 8) == pytest.approx(400e9, rel=0.02)
    ours = Links(cluster, calibration.find(cluster))
    assert ours.seconds("all_reduce", 4096, 8, 1) == pytest.approx(33e-6, rel=0.1)
    assert "nccl.log" in calibration.find(cluster).words


def test_between_nodes_what_a_node_reaches_is_shared_by_its_devices(tmp_path: Path) -> None:
    cluster = notation.find("32xH100")
    hosts = [name for name in "abcd" for _ in range(8)]
    use_links(written(tmp_path / "nccl.log", log(hosts, 200e9)), cluster)
    assert reached("32xH100", 32) == pytest.approx(200e9, rel=0.03)
    assert reached("32xH100", 4, 8) == pytest.approx(200e9 / 8, rel=0.03)


def test_one_rank_of_each_node_shows_one_adapter(tmp_path: Path) -> None:
    cluster = notation.find("32xH100")
    use_links(written(tmp_path / "nccl.log", log(list("abcd"), 20e9)), cluster)
    assert reached("32xH100", 4, 8) == pytest.approx(20e9, rel=0.05)
    assert reached("32xH100", 32) == pytest.approx(160e9, rel=0.05)


def test_several_logs_in_one_file(tmp_path: Path) -> None:
    hosts = [name for name in "ab" for _ in range(8)]
    both = log(["a"] * 8, 350e9) + log(hosts, 250e9, op="all_gather")
    first, second = read_logs(both)
    assert (first.nodes, second.nodes) == (1, 2)
    assert {call.op for call in first.calls} == {"all_reduce"}
    assert {call.op for call in second.calls} == {"all_gather"}
    use_links(written(tmp_path / "both.log", both), notation.find("16xH100"))
    found = calibration.find(notation.find("16xH100"))
    assert found.fast.bandwidth == pytest.approx(350e9, rel=0.02)
    assert found.network.bandwidth == pytest.approx(250e9, rel=0.02)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather"])
def test_an_old_log_does_not_name_its_operation(op: str) -> None:
    (found,) = read_logs(log(["a"] * 8, op=op, named=False))
    assert {call.op for call in found.calls} == {op} and len(found.calls) == len(SIZES)
    assert found.calls[-1].bus_bandwidth == pytest.approx(300e9, rel=0.05)


def test_what_bench_comm_stored(tmp_path: Path) -> None:
    rates = calibration.FAST.model_copy(update={"bandwidth": 123e9, "source": "here"})
    stored = StoredLinks(format=FORMAT, device="H100", fast=rates)
    use_links(written(tmp_path / "H100.json", stored.model_dump_json()), notation.find("8xH100"))
    assert calibration.find(notation.find("8xH100")).fast.bandwidth == 123e9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no table of nccl-tests"),
        ("epoch 1 loss 2.5\n", "no table of nccl-tests"),
        ('{"format": 1}', "not what shoal bench comm stores"),
        (log(["a"]), "no table of nccl-tests between two ranks"),
        (log(["a"] * 8, gpu="NVIDIA A100-SXM4-80GB"), "measured between NVIDIA A100-SXM4-80GB, not H100"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        use_links(written(tmp_path / "file", text), notation.find("8xH100"))
    assert not calibration.find(notation.find("8xH100")).links


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        use_links(tmp_path / "nowhere.log", notation.find("8xH100"))
