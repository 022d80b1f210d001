"""Tables: Parquet and Arrow files, and directories saved by the ``datasets`` package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.facts.input.untrusted_files import read_json
from shoal.facts.problem import BadInput

ENDINGS = (".parquet", ".arrow", ".feather")
STATE, SPLITS = "state.json", "dataset_dict.json"
ROWS_AT_ONCE = 1024


def check_readable(name: str) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise BadInput(
            f"reading {name!r} needs the pyarrow package",
            "pip install pyarrow, or convert the files to .jsonl",
        ) from None


def row_group_bytes(path: Path) -> list[int]:
    """Bytes of each row group of a Parquet file; a single number for an Arrow file, which is read from its start."""
    if path.suffix.lower() != ".parquet":
        return [path.stat().st_size]
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        about = parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise damaged(path.name, error) from None
    return [about.row_group(number).total_byte_size for number in range(about.num_row_groups)]


def read_table(path: Path, name: str, groups: range, column: str | None) -> Iterator[dict[str, Any]]:
    """The rows of these row groups; only one column, if that column exists."""
    import pyarrow

    try:
        batches = (
            _parquet(path, groups, column) if path.suffix.lower() == ".parquet" else _arrow(path, column)
        )
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                for row in batch.slice(start, ROWS_AT_ONCE).to_pylist():
                    yield {name: _present(value) for name, value in row.items()}
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise damaged(name, error) from None


def _present(value: Any) -> Any:
    """Drop null fields of objects: a table gives each object the fields of all others in the column."""
    if isinstance(value, dict):
        return {name: _present(one) for name, one in value.items() if one is not None}
    return [_present(one) for one in value] if isinstance(value, list) else value


def damaged(name: str, error: Exception) -> BadInput:
    words = str(error).partition("\n")[0]
    return BadInput(f"{name!r} is damaged: {words}", "fetch it again, or leave it out of data.source")


def saved_files(directory: Path) -> list[Path] | None:
    """The Arrow files of a directory saved by ``datasets``, in order; None for any other directory."""
    if (directory / SPLITS).is_file():
        splits = _names(directory / SPLITS, "splits", None)
        if "train" not in splits and len(splits) != 1:
            raise BadInput(
                f"{str(directory)!r} holds the data sets {', '.join(splits) or 'none'}, and no train",
                f"name one of them, such as {str(directory / (splits or ['train'])[0])!r}",
            )
        return saved_files(directory / ("train" if "train" in splits else splits[0]))
    if not (directory / STATE).is_file():
        return None
    if _content(directory / STATE).get("_indices_data_files"):
        raise BadInput(
            f"{str(directory)!r} keeps an order beside its rows, which is not read",
            "flatten_indices() before save_to_disk()",
        )
    return [directory / name for name in _names(directory / STATE, "_data_files", "filename")]


def _names(file: Path, key: str, inner: str | None) -> list[str]:
    """Names of files beside this one. They must not lead elsewhere, even if the file was made by hand."""
    found = _content(file).get(key, [])
    names = [one.get(inner) if inner and isinstance(one, dict) else one for one in found]
    plain = [
        name for name in names if isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) and name[0] != "."
    ]
    if len(plain) != len(names):
        raise BadInput(f"{str(file)!r} is not as the datasets package writes it", "save the data set again")
    return plain


def _content(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise BadInput(f"{str(file)!r} cannot be read: {error}", "save the data set again") from None
    return content if isinstance(content, dict) else {}


def _parquet(path: Path, groups: range, column: str | None) -> Iterator[Any]:
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path, memory_map=True) as file:
        columns = [column] if column in file.schema_arrow.names else None
        for number in groups:
            yield from file.iter_batches(row_groups=[number], columns=columns, batch_size=ROWS_AT_ONCE)


def _arrow(path: Path, column: str | None) -> Iterator[Any]:
    """Both Arrow formats: the file, which Feather uses, and the stream, which ``datasets`` writes."""
    import pyarrow
    from pyarrow import ipc

    with pyarrow.memory_map(str(path)) as source:
        try:
            file = ipc.open_file(source)
            batches: Iterator[Any] = (file.get_batch(number) for number in range(file.num_record_batches))
        except pyarrow.ArrowInvalid:
            source.seek(0)
            batches = iter(ipc.open_stream(source))
        for batch in batches:
            yield batch.select([column]) if column in batch.schema.names else batch
