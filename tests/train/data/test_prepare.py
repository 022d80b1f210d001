"""Preparing: equal results whichever process does the work, done once, whole or not there."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf

from shoal.facts.problem import BadInput
from shoal.train.data import encode, encode_all, rows, shards
from shoal.train.data.dataset import Dataset
from shoal.train.data.prepare import prepare

END = 256


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def some_texts(count, seed=0):
    generator = random.Random(seed)
    return ["".join(generator.choices("abc é\n", k=generator.randint(1, 60))) for _ in range(count)]


def documents(stream):
    """The stream cut at its document ends, as bytes, with the end id checked and taken off."""
    ends = stream.document_ends.tolist()
    found = []
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        ids = stream.read(start, stop)
        assert ids[-1] == END and END not in ids[:-1]
        found.append(bytes(ids[:-1].tolist()).decode(errors="replace"))
    assert not ends or ends[-1] == len(stream)
    return found


def content(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture
def small_pieces(monkeypatch):
    """Many pieces, tasks, shards and blocks out of little text."""
    monkeypatch.setattr(rows, "PIECE_BYTES", 500)
    monkeypatch.setattr(encode, "PIECE_BYTES", 1500)
    monkeypatch.setattr(encode_all, "INLINE_BYTES", 0)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(shards, "BLOCK_TOKENS", 170)


def test_every_document_is_in_one_split_and_in_order(tmp_path, small_pieces):
    texts = some_texts(400)
    write_lines(tmp_path / "a.jsonl", texts)
    dataset = Dataset.open(
        prepare(str(tmp_path / "*.jsonl"), cache=tmp_path, heldout=0.1, workers=1), verify=True
    )
    train, heldout = documents(dataset.train), documents(dataset.heldout)
    assert len(dataset.manifest["splits"]["train"]["shards"]) > 3
    assert 20 < len(heldout) < 65
    held = shards.is_held_out(np.arange(400), 0.1)
    assert train == [text for text, out in zip(texts, held, strict=True) if not out]
    assert heldout == [text for text, out in zip(texts, held, strict=True) if out]


def test_which_documents_are_held_out_depends_on_their_number_alone(tmp_path):
    held = shards.is_held_out(np.arange(100_000), 0.05)
    assert 0.045 < held.mean() < 0.055
    assert (shards.is_held_out(np.arange(50_000, 60_000), 0.05) == held[50_000:60_000]).all()
    assert not (held & ~shards.is_held_out(np.arange(100_000), 0.06)).any()


@pytest.mark.parametrize("heldout", [0.1, 0.013, 0.0])
def test_one_long_text_holds_out_its_tail(tmp_path, small_pieces, heldout):
    text = "a line of text\nand another é\n" * 200
    (tmp_path / "a.txt").write_text(text)
    path = prepare(str(tmp_path / "a.txt"), cache=tmp_path / "cache", heldout=heldout, workers=1)
    dataset = Dataset.open(path, verify=True)
    whole = [*text.encode(), END]
    held = round(len(whole) * heldout)
    cut = len(whole) - held
    train = dataset.train.read(0, len(dataset.train)).tolist()
    assert train == ([*whole[:cut], END] if held else whole)
    assert dataset.heldout.read(0, len(dataset.heldout)).tolist() == (whole[cut:] if held else [])
    assert dataset.train.document_ends.tolist() == [len(train)]
    assert len(dataset.heldout.document_ends) == bool(held)


def test_few_documents_also_hold_out_the_tail(tmp_path):
    write_lines(tmp_path / "a.jsonl", ["x" * 50, "y" * 50])
    dataset = Dataset.open(prepare(str(tmp_path / "a.jsonl"), cache=tmp_path, heldout=0.25, workers=1))
    assert documents(dataset.train) == ["x" * 50, "y" * 25]
    assert documents(dataset.heldout) == ["y" * 25]


def test_the_number_of_workers_changes_no_byte(tmp_path, small_pieces):
    write_lines(tmp_path / "a.jsonl", some_texts(150))
    (tmp_path / "b.txt").write_text("first line\nsecond line\n" * 100)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n{"broken\n'))
    (tmp_path / "d.txt").write_bytes(b"\xff\xfe")
    seen = {}
    one, two = (
        prepare(
            str(tmp_path / "?.*"),
            cache=tmp_path / f"cache{workers}",
            heldout=0.1,
            workers=workers,
            progress=lambda done, total, workers=workers: seen.setdefault(workers, []).append((done, total)),
        )
        for workers in (1, 2)
    )
    assert content(one) == content(two)
    assert one.name == two.name
    for reported in seen.values():
        total = sum(path.stat().st_size for path in tmp_path.glob("?.*"))
        assert reported[-1] == (total, total) and reported == sorted(reported) and len(reported) > 3


def test_bad_input_in_a_worker_arrives(tmp_path, small_pieces):
    write_lines(tmp_path / "a.jsonl", some_texts(150))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 9)[:-9])
    with pytest.raises(BadInput, match=r"b\.jsonl\.gz' is damaged(.|\n)*fix: fetch it again"):
        prepare(str(tmp_path / "*.*"), cache=tmp_path / "cache", workers=2)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_second_run_finds_what_the_first_made(tmp_path):
    write_lines(tmp_path / "a.jsonl", some_texts(50))
    call = {"cache": tmp_path / "cache", "heldout": 0.1, "workers": 1}
    first = prepare(str(tmp_path / "a.jsonl"), **call)
    before = [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(first.iterdir())]
    (tmp_path / "a.jsonl").rename(tmp_path / "moved.jsonl")
    assert prepare(str(tmp_path / "moved.jsonl"), **call) == first
    assert prepare(str(first), **call) == first
    assert [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(first.iterdir())] == before

    other_split = prepare(str(tmp_path / "moved.jsonl"), **{**call, "heldout": 0.2})
    write_lines(tmp_path / "moved.jsonl", some_texts(50, seed=1))
    other_text = prepare(str(tmp_path / "moved.jsonl"), **call)
    assert len({first, other_split, other_text}) == 3


def test_a_damaged_earlier_result_is_not_used(tmp_path):
    write_lines(tmp_path / "a.jsonl", some_texts(50))
    path = prepare(str(tmp_path / "a.jsonl"), cache=tmp_path / "cache")
    (path / "bad_rows.jsonl").unlink()
    with pytest.raises(BadInput, match=r"is missing(.|\n)*fix: delete"):
        prepare(str(tmp_path / "a.jsonl"), cache=tmp_path / "cache")


def test_two_runs_at_once_give_one_dataset(tmp_path):
    write_lines(tmp_path / "a.jsonl", some_texts(50))
    meeting = threading.Barrier(2, timeout=20)  # both are past the look for an earlier result
    results = []

    def wait(done, total):
        meeting.wait()

    def run():
        results.append(
            prepare(
                str(tmp_path / "a.jsonl"),
                cache=tmp_path / "cache",
                workers=1,
                progress=wait,
            )
        )

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and results[0] == results[1]
    Dataset.open(results[0], verify=True)
    assert list((tmp_path / "cache").iterdir()) == [results[0]]


KILLED = """
import sys, time
from pathlib import Path
from shoal.train.data.prepare import prepare

def progress(done, total):
    print("working", flush=True)
    time.sleep(60)

prepare(sys.argv[1], cache=Path(sys.argv[2]), workers=1, progress=progress)
"""


def test_a_killed_run_leaves_nothing_that_opens_and_is_cleaned_up(tmp_path):
    write_lines(tmp_path / "a.jsonl", some_texts(50))
    cache = tmp_path / "cache"
    source = str(tmp_path / "a.jsonl")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, source, str(cache)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "working\n"

    (left,) = cache.iterdir()
    age(left)
    done = prepare(source, cache=cache, workers=1)
    assert left.exists(), "its owner is alive, however long it has not written"

    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with pytest.raises(BadInput, match="is not a prepared dataset"):
        Dataset.open(left)
    os.utime(left)
    prepare(source, cache=cache, heldout=0.2, workers=1)
    assert left.exists(), "it may belong to another machine until it is old"
    age(left)
    prepare(source, cache=cache, heldout=0.3, workers=1)
    assert not left.exists()
    Dataset.open(done, verify=True)


def age(directory):
    for path in (*directory.rglob("*"), directory):
        os.utime(path, (time.time() - 10_000,) * 2)


KILLED_WITH_WORKERS = """
import sys, time
from pathlib import Path
from shoal.train.data import encode, encode_all
from shoal.train.data.prepare import prepare

def progress(done, total):
    print("working", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    encode_all.INLINE_BYTES = 0
    encode.PIECE_BYTES = 100
    prepare(sys.argv[1], cache=Path(sys.argv[2]), workers=2, progress=progress)
"""


def test_workers_of_a_killed_run_end(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("x" * 100)
    script = tmp_path / "script.py"
    script.write_text(KILLED_WITH_WORKERS)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "?.txt"), str(tmp_path / "cache")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "working\n"
    assert workers_of(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while workers_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not workers_of(process.pid)


def workers_of(session):
    """Live processes of a session besides its leader."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z" and int(status.parent.name) != session:
            found.append(status.parent.name)
    return found


def test_a_failure_leaves_nothing(tmp_path):
    def fail(done, total):
        raise RuntimeError("stop")

    write_lines(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(RuntimeError, match="stop"):
        prepare(str(tmp_path / "a.jsonl"), cache=tmp_path / "cache", progress=fail)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_source_that_changes_meanwhile_is_refused(tmp_path):
    write_lines(tmp_path / "a.jsonl", ["x"])

    def change(done, total):
        write_lines(tmp_path / "a.jsonl", ["other"])

    with pytest.raises(BadInput, match="changed while"):
        prepare(str(tmp_path / "a.jsonl"), cache=tmp_path / "cache", progress=change)


def test_bad_rows_are_kept_apart_with_their_lines(tmp_path, small_pieces):
    lines = [json.dumps({"text": text}) for text in some_texts(300)]
    lines[7], lines[120], lines[299] = "{torn", '{"other": 1}', json.dumps({"text": 5, "long": "x" * 500})
    lines.insert(50, "")
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    path = prepare(str(tmp_path / "a.jsonl"), cache=tmp_path, workers=1)
    dataset = Dataset.open(path)
    assert dataset.manifest["rows"] == 300
    assert dataset.manifest["bad_rows"] == {
        "broken JSON": 1,
        "field 'text' is not a text": 1,
        "no field 'text'": 1,
    }
    kept = [json.loads(line) for line in (path / "bad_rows.jsonl").read_text().splitlines()]
    name = str(tmp_path / "a.jsonl")
    assert [(row["file"], row["line"]) for row in kept] == [(name, 8), (name, 122), (name, 301)]
    assert kept[0] == {"file": name, "line": 8, "reason": "broken JSON", "start": "{torn"}
    assert kept[2]["start"] == lines[300][:200]
    assert len(documents(dataset.train)) + len(documents(dataset.heldout)) == 297


def test_too_many_bad_rows_are_refused_also_when_found_prepared(tmp_path):
    lines = [json.dumps({"text": "fine"})] * 100 + ["{torn"] * 11
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    call = {"source": str(tmp_path / "a.jsonl"), "cache": tmp_path / "cache", "workers": 1}
    message = r"11 of the 111 rows(.|\n)*at most 10(.|\n)*broken JSON: 11(.|\n)*a\.jsonl:101: broken JSON"
    with pytest.raises(BadInput, match=message):
        prepare(**call)
    assert list((tmp_path / "cache").iterdir()) == []
    prepare(**call, max_bad_rows=0.2)
    with pytest.raises(BadInput, match=message):
        prepare(**call)


def test_nothing_good_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(BadInput, match=r"a\.txt' is empty: there is no text in it"):
        prepare(str(tmp_path / "a.txt"), cache=tmp_path / "cache")
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(BadInput, match=r"a\.jsonl' is empty"):
        prepare(str(tmp_path / "a.jsonl"), cache=tmp_path / "cache")


def test_a_bad_piece_of_a_long_text_does_not_join_its_neighbours(tmp_path, small_pieces):
    (tmp_path / "a.txt").write_bytes(b"good line\n" * 100 + b"bad \xff line\n" * 60)
    (tmp_path / "b.txt").write_text("other")
    path = prepare(str(tmp_path / "?.txt"), cache=tmp_path / "cache", heldout=0, workers=1, max_bad_rows=0.9)
    first, second = documents(Dataset.open(path).train)
    assert first.startswith("good line\ngood line\n") and "bad" not in first
    assert second == "other"
    kept = [json.loads(line) for line in (path / "bad_rows.jsonl").read_text().splitlines()]
    assert all(row["reason"] == "invalid UTF-8" and row["line"] > 50 for row in kept)


def test_a_prepared_directory_must_match_the_tokenizer(tmp_path):
    write_lines(tmp_path / "a.jsonl", ["cat " * 9])
    vocabulary = {"cat": 0, "</s>": 1} | {f"word{number}": number for number in range(2, 70_000)}
    hf.Tokenizer(hf.models.WordLevel(vocabulary)).save(str(tmp_path / "tokenizer.json"))
    tokenizer = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = prepare(
        str(tmp_path / "a.jsonl"),
        tokenizer=str(tmp_path / "tokenizer.json"),
        cache=tmp_path / "cache",
        heldout=0,
    )
    dataset = Dataset.open(path, verify=True)
    assert dataset.manifest["dtype"] == "<u4"
    assert dataset.train.read(0, len(dataset.train)).tolist() == [0] * 9 + [1]
    with pytest.raises(BadInput, match="another tokenizer"):
        prepare(str(path), tokenizer="bytes", cache=tmp_path / "cache")


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write to the data cache"):
        prepare("stdlib", cache=tmp_path / "file" / "cache")


def test_workers_do_not_load_torch():
    code = "import sys, shoal.train.data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
