"""Sources and rows: which files, which documents, and what is wrong with the others."""

import glob
import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from shoal.facts.problem import BadInput
from shoal.train.data import rows
from shoal.train.data.row_format import RowFormat
from shoal.train.data.rows import cut, read
from shoal.train.data.sources import find_files


def texts(path, field="text"):
    return [
        row.documents and row.documents[0].text
        for file in find_files(str(path))
        for piece in cut(file)
        for row in read(piece, RowFormat(field))
    ]


def test_the_standard_library_is_megabytes_and_always_the_same():
    files = find_files("stdlib")
    assert sum(file.size for file in files) > 5_000_000
    names = [file.name for file in files]
    assert names == sorted(names) and files == find_files("stdlib")
    assert "json/decoder.py" in names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]


def test_one_text_file_is_one_document_in_the_order_of_names(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "a.txt").write_text("first\n\nstill first")
    (tmp_path / "deep" / "c.py").write_text("third")
    assert texts(tmp_path / "**" / "*.*") == ["first\n\nstill first", "second", "third"]


def test_a_name_with_brackets_is_a_file_not_a_pattern(tmp_path):
    (tmp_path / "a[1].txt").write_text("here")
    assert texts(tmp_path / "a[1].txt") == ["here"]


def test_lines_plain_and_compressed(tmp_path):
    # A byte-order mark, Windows line ends, blank lines, and U+2028, which JSON allows inside a text.
    content = "\ufeff" + '{"text": "a\u2028b"}\r\n\n{"text": "c"}'
    (tmp_path / "a.jsonl").write_bytes(content.encode())
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as handle:
        handle.write(content.encode())
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(b'{"body": 1, "text": "d"}\n'))
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"one\ndocument"))
    lines = ["a\u2028b", None, "c"]
    assert texts(tmp_path / "*.*") == [*lines, *lines, "d", "one\ndocument"]


def test_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x", "text": "y"}\n')
    assert texts(tmp_path / "a.jsonl", field="body") == ["x"]


BAD = {
    b"{broken": "broken JSON",
    b"[" * 100_000: "broken JSON",
    b'{"text": ' + b"1" * 5000 + b"}": "broken JSON",
    b"[1]": "not an object",
    b'{"other": "x"}': "no field 'text'",
    b'{"text": null}': "field 'text' is not a text",
    b'{"text": ""}': "empty",
    b'{"text": "\xff"}': "invalid UTF-8",
    b'{"text": "\\ud800"}': "invalid UTF-8",
}


@pytest.mark.parametrize(("line", "reason"), BAD.items(), ids=range(len(BAD)))
def test_every_reason(tmp_path, line, reason):
    (tmp_path / "a.jsonl").write_bytes(line)
    (row,) = (row for file in find_files(str(tmp_path / "*")) for row in read(next(cut(file)), RowFormat()))
    assert (row.documents, row.reason) == (None, reason)
    assert len(row.shown) <= 200 and line.decode(errors="replace").startswith(row.shown)


def test_pieces_join_to_the_whole_and_cut_only_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "PIECE_BYTES", 100)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in range(1, 80)))
    assert texts(tmp_path / "a.jsonl") == ["x" * n for n in range(1, 80)]
    assert len(list(cut(find_files(str(tmp_path / "a.jsonl"))[0]))) > 20

    long = "word \n\n  indented é\nnext line\r\n" * 50
    (tmp_path / "a.txt").write_text(long, newline="")
    pieces = texts(tmp_path / "a.txt")
    assert len(pieces) > 10 and "".join(pieces) == long
    assert all(piece.endswith(("é\n", "line\r\n")) for piece in pieces)


def test_a_line_without_end_is_refused_before_it_is_in_memory(tmp_path, monkeypatch):
    """A few megabytes can unpack to gigabytes: reading ends at the limit, and the message says where."""
    monkeypatch.setattr(rows, "LONGEST_LINE", 1 << 20)
    monkeypatch.setattr(rows, "PIECE_BYTES", 20)
    lines = b'{"text": "a"}\n' * 3
    fits = b'{"text": "' + b"b" * (rows.LONGEST_LINE - 13) + b'"}\n'
    assert len(fits) == rows.LONGEST_LINE
    for name, write in (("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress)):
        path = tmp_path / name
        path.write_bytes(write(lines + fits + lines))
        assert len(texts(path)) == 7
        path.write_bytes(write(lines + fits[:-3] + b"bbb" * 10_000_000))
        tracemalloc.start()
        with pytest.raises(BadInput, match=rf"{name}', line 4, is longer than 1 MiB"):
            texts(path)
        assert tracemalloc.get_traced_memory()[1] < 10 * rows.LONGEST_LINE
        tracemalloc.stop()


def test_a_text_that_can_only_be_read_at_once_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "LONGEST_TEXT", 1 << 20)
    monkeypatch.setattr(rows, "PIECE_BYTES", 100)
    begin = "a line\n" * 40
    long = "x" * (rows.LONGEST_TEXT + 1)
    (tmp_path / "a.txt").write_text(begin + long)
    with pytest.raises(BadInput, match=r"a.txt': from line 3\d on there are more than 1 MiB"):
        texts(tmp_path / "a.txt")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress((long * 20).encode()))
    with pytest.raises(BadInput, match=r"a.txt.gz': from line 1 (.|\n)*unpack it"):
        texts(tmp_path / "a.txt.gz")
    (tmp_path / "a.txt").write_text(begin + "x" * 1000)
    assert "".join(texts(tmp_path / "a.txt")) == begin + "x" * 1000


def test_globs_do_not_follow_links_round_in_circles(tmp_path):
    for folder in ("a/deep", "b", ".hidden"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "text.txt").write_text("x")
    for number in range(12):  # each would be entered from each of the others
        (tmp_path / "a" / f"loop-{number}").symlink_to(tmp_path)
    (tmp_path / "b" / "link.txt").symlink_to(tmp_path / "a" / "deep" / "text.txt")
    names = [file.name.removeprefix(f"{tmp_path}/") for file in find_files(f"{tmp_path}/**/*.txt")]
    assert names == ["a/deep/text.txt", "b/link.txt", "b/text.txt"]
    assert len(find_files(f"{tmp_path}/**/deep/**/*.txt")) == len(find_files(f"{tmp_path}/a/**")) == 1
    # A link that is named is meant.
    assert len(find_files(f"{tmp_path}/a/loop-1/b/*.txt")) == 2


def test_globs_name_what_pythons_own_names(tmp_path, monkeypatch):
    for name in ("a.txt", "x/b.txt", "x/y/c.txt", "x/[y]/d.txt", "x/.h/e.txt", "x/y/.f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    for pattern in (
        "**/*.txt",
        "**",
        "x/**/*.txt",
        "./**/y/*",
        "*/**/?.txt",
        f"{tmp_path}/**/*",
        "x/.h/**",
        "x/**/y/**",
    ):
        found = glob.glob(pattern, recursive=True)  # noqa: PTH207
        files = {name.removeprefix("./") for name in found if Path(name).is_file()}
        assert {file.name for file in find_files(pattern)} == files, pattern


def test_nothing_there(tmp_path):
    with pytest.raises(BadInput, match="names no file"):
        find_files(str(tmp_path / "*.txt"))
    with pytest.raises(BadInput, match=r"is a directory(.|\n)*\*\*/\*\.txt"):
        find_files(str(tmp_path))
    (tmp_path / "a.zip").write_bytes(b"PK")
    with pytest.raises(BadInput, match="neither text nor rows"):
        find_files(str(tmp_path / "*"))


def test_a_damaged_archive_is_refused(tmp_path):
    whole = gzip.compress(b'{"text": "a"}\n' * 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match="is damaged"):
        texts(tmp_path / "a.jsonl.gz")
