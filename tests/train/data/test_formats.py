"""Formats: the same rows give the same tokens however they are stored, packed, split or served."""

import bz2
import gzip
import json
import lzma

import fsspec
import pyarrow
import pytest
import zstandard
from pyarrow import ipc, parquet

from shoal.facts.problem import BadInput
from shoal.train.data import encode, rows
from shoal.train.data import prepare as prepare_module
from shoal.train.data.dataset import Dataset
from shoal.train.data.prepare import prepare
from shoal.train.data.remote import fetch
from shoal.train.data.sources import find_files

TEXTS = [f"shoal {number} " + "fish " * (number % 7) for number in range(100)]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(rows, "PIECE_BYTES", 300)
    monkeypatch.setattr(encode, "PIECE_BYTES", 600)


def lines(texts=TEXTS):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def table(texts=TEXTS):
    return pyarrow.table({"id": range(len(texts)), "text": texts})


def write_stream(path, content):
    with ipc.new_stream(path, content.schema) as file:
        for batch in content.to_batches(max_chunksize=17):
            file.write_batch(batch)


def write_file(path, content):
    with ipc.new_file(path, content.schema) as file:
        file.write_table(content, max_chunksize=17)


def saved_directory(path, splits=None):
    """As ``datasets.Dataset.save_to_disk`` leaves it; of a ``DatasetDict``, one directory a split."""
    if splits:
        path.mkdir()
        (path / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
        for name, texts in splits.items():
            write_saved(path / name, texts)
    else:
        write_saved(path, TEXTS)
    return path


def write_saved(path, texts):
    path.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    half = len(texts) // 2
    for name, part in zip(names, (texts[:half], texts[half:]), strict=True):
        write_stream(path / name, table(part))
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train", "_format_type": None}
    (path / "state.json").write_text(json.dumps(state))
    (path / "dataset_info.json").write_text("{}")


def fingerprint(source, tmp_path, **options):
    options = {"heldout": 0.1, "max_bad_rows": 0, "workers": 1, **options}
    return Dataset.open(prepare(str(source), cache=tmp_path / "cache", **options), verify=True).fingerprint


@pytest.fixture
def plain(tmp_path, small_pieces):
    (tmp_path / "plain.jsonl").write_bytes(lines())
    return fingerprint(tmp_path / "plain.jsonl", tmp_path)


def zstandard_frames(content):
    """Two frames, as parallel compressors write them."""
    half = len(content) // 2
    return b"".join(zstandard.compress(part) for part in (content[:half], content[half:]))


@pytest.mark.parametrize(
    ("ending", "compress"),
    [("gz", gzip.compress), ("zst", zstandard_frames), ("bz2", bz2.compress), ("xz", lzma.compress)],
)
def test_compressed_rows_are_the_same_rows(tmp_path, plain, ending, compress):
    packed = compress(lines())
    (tmp_path / f"a.jsonl.{ending}").write_bytes(packed)
    assert fingerprint(tmp_path / f"a.jsonl.{ending}", tmp_path) == plain
    (tmp_path / f"cut.jsonl.{ending}").write_bytes(packed[: len(packed) // 3])
    with pytest.raises(BadInput, match="is damaged"):
        fingerprint(tmp_path / f"cut.jsonl.{ending}", tmp_path)


def test_tables_and_shards_are_the_same_rows(tmp_path, plain):
    parquet.write_table(table(), tmp_path / "a.parquet", row_group_size=13)
    write_file(tmp_path / "a.arrow", table())
    write_stream(tmp_path / "b.arrow", table())
    for name in ("a.parquet", "a.arrow", "b.arrow"):
        assert fingerprint(tmp_path / name, tmp_path) == plain, name
    for number in range(4):
        parquet.write_table(table(TEXTS[number * 25 : number * 25 + 25]), tmp_path / f"part-{number}.parquet")
    assert fingerprint(tmp_path / "part-*.parquet", tmp_path) == plain


def test_a_large_table_is_read_in_pieces(tmp_path, small_pieces):
    parquet.write_table(table(), tmp_path / "a.parquet", row_group_size=13)
    (file,) = find_files(str(tmp_path / "a.parquet"))
    pieces = list(rows.cut(file))
    assert len(pieces) > 2
    assert [number for piece in pieces for number in piece.groups] == list(range(8))
    assert sum(piece.stop - piece.start for piece in pieces) == file.size


def test_directories_that_datasets_saved(tmp_path, plain):
    assert fingerprint(saved_directory(tmp_path / "one"), tmp_path) == plain
    both = saved_directory(tmp_path / "both", {"train": TEXTS, "test": TEXTS[:40]})
    assert fingerprint(both, tmp_path) == plain
    assert fingerprint(both / "test", tmp_path) != plain
    with pytest.raises(BadInput, match="holds the data sets a, b, and no train"):
        fingerprint(saved_directory(tmp_path / "other", {"a": TEXTS, "b": TEXTS}), tmp_path)
    (both / "train" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(BadInput, match="is missing"):
        fingerprint(both, tmp_path)
    state = json.loads((both / "test" / "state.json").read_text())
    state["_data_files"][0]["filename"] = "../../plain.jsonl"
    (both / "test" / "state.json").write_text(json.dumps(state))
    with pytest.raises(BadInput, match="not as the datasets package writes it"):
        fingerprint(both / "test", tmp_path)


def test_bad_rows_of_tables_are_named(tmp_path):
    parquet.write_table(pyarrow.table({"text": ["a", None, "b", ""]}), tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"a\.parquet:2: field 'text' is not a text(.|\n)*a\.parquet:4: empty"):
        fingerprint(tmp_path / "a.parquet", tmp_path)
    with pytest.raises(BadInput, match="no field 'body'"):
        fingerprint(tmp_path / "a.parquet", tmp_path, field="body")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(BadInput, match="is damaged"):
        fingerprint(tmp_path / "b.parquet", tmp_path)


def test_conversations_in_a_table(tmp_path):
    talk = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 3)
    parquet.write_table(pyarrow.table({"messages": [talk] * 3}), tmp_path / "a.parquet")
    options = {"format": "chat", "template": str(template), "heldout": 0}
    assert fingerprint(tmp_path / "a.parquet", tmp_path, **options) == fingerprint(
        tmp_path / "a.jsonl", tmp_path, **options
    )


def test_files_in_memory_of_fsspec(tmp_path, plain):
    files = fsspec.filesystem("memory")
    half = len(TEXTS) // 2
    files.pipe("/corpus/a.jsonl", lines(TEXTS[:half]))
    files.pipe("/corpus/b.jsonl.gz", gzip.compress(lines(TEXTS[half:])))
    try:
        assert fingerprint("memory://corpus/*", tmp_path) == plain
        with pytest.raises(BadInput, match="names no file"):
            fingerprint("memory://corpus/*.txt", tmp_path)
    finally:
        files.rm("/corpus", recursive=True)
    with pytest.raises(BadInput, match="fsspec knows"):
        fingerprint("nosuch://corpus/*", tmp_path)


def test_what_was_fetched_once_is_known_by_what_its_server_says(tmp_path, plain, monkeypatch):
    folder = tmp_path / "served"
    folder.mkdir()
    half = len(TEXTS) // 2
    (folder / "a.jsonl").write_bytes(lines(TEXTS[:half]))
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(lines(TEXTS[half:])))
    url = f"file://{folder}/*"
    assert fingerprint(url, tmp_path) == plain
    assert not list((tmp_path / "cache").rglob("*fetched*"))

    fetched = []
    monkeypatch.setattr(prepare_module, "fetch", lambda *given: fetched.append(given) or fetch(*given))
    assert fingerprint(url, tmp_path) == plain and not fetched
    (folder / "a.jsonl").write_bytes(lines(TEXTS[: half + 1]))
    assert fingerprint(url, tmp_path) != plain and len(fetched) == 1
