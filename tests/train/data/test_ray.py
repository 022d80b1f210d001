"""``data.ray``: a real two-node Ray on this machine tokenises to the same bytes as one process does."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import __version__
from shoal.facts.problem import BadInput
from shoal.train.data import encode, rows
from shoal.train.data.prepare import prepare
from shoal.train.data.ray_engine import encode_away
from shoal.train.data.row_format import row_format
from shoal.train.data.sources import find_files
from shoal.train.data.tokenizers import open_tokenizer


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes; each has a core."""
    pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[system]'")
    import ray
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 150_000_000, "include_dashboard": False}
    made: Any = Cluster(initialize_head=True, head_node_args=small)
    made.add_node(num_cpus=1, object_store_memory=150_000_000)
    ray.init(address=made.address, log_to_driver=False)
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    ray.shutdown()
    try:
        yield made.address
    finally:
        ray.shutdown()
        made.shutdown()


def write_corpus(directory: Path) -> Path:
    """Rows of all kinds in several files: texts, duplicates, broken ones."""
    directory.mkdir()
    for number in range(5):
        lines = [json.dumps({"text": f"{word} of {number}, über " * (3 + word % 7)}) for word in range(40)]
        lines += lines[:3] + ["{broken"] * (number == 2)
        (directory / f"part-{number}.jsonl").write_text("\n".join(lines) + "\n")
    return directory / "*.jsonl"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.mark.system
def test_two_nodes_make_the_same_bytes(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(write_corpus(tmp_path / "corpus"))
    monkeypatch.setattr(rows, "PIECE_BYTES", 2000)
    monkeypatch.setattr(encode, "PIECE_BYTES", 2000)
    seen: list[tuple[int, int]] = []
    alone = prepare(source, cache=tmp_path / "alone", heldout=0.1, max_bad_rows=0.1, workers=1)
    on_ray = prepare(
        source,
        cache=tmp_path / "ray",
        heldout=0.1,
        max_bad_rows=0.1,
        ray=cluster,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert on_ray.name == alone.name
    assert contents(on_ray) == contents(alone)
    assert len(seen) > 5 and seen[-1][0] == seen[-1][1]  # several tasks
    import ray

    assert not ray.is_initialized()  # it has left


def test_a_node_with_another_tokenizer_or_another_file_is_refused(tmp_path: Path) -> None:
    source = str(write_corpus(tmp_path / "corpus"))
    pieces = [piece for file in find_files(source) for piece in rows.cut(file)]
    opened = open_tokenizer("bytes", None)
    reading = row_format(opened, None, "text", "text", "auto", None)
    tasks = list(encode.group(pieces, tmp_path, reading))
    assert "another tokenizer" in encode_away(0, tasks, "bytes", None, "other", __version__)["problem"]
    assert "Shoal" in encode_away(0, tasks, "bytes", None, opened.fingerprint, "0.0.1")["problem"]
    (tmp_path / "corpus" / "part-0.jsonl").write_text("{}")
    found = encode_away(0, tasks, "bytes", None, opened.fingerprint, __version__)
    assert "not the same" in found["problem"]


def test_without_ray_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match="pip install 'ray"):
        prepare(str(write_corpus(tmp_path / "corpus")), cache=tmp_path / "cache", ray="auto")
