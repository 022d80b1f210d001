"""Tokenise a run's data with a progress bar."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from shoal.facts.config import DataSection
from shoal.train.data.prepare import prepare


def prepared(data: DataSection, console: Console) -> Path:
    """The directory of the tokenised data, made now or found."""
    columns = (TextColumn("tokenising {task.fields[source]}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenising", total=None, source=data.source)
        return prepare(
            data.source,
            tokenizer=data.tokenizer,
            end_token=data.end_token,
            field=data.field,
            cache=Path(data.cache).expanduser() / "data",
            heldout=data.heldout,
            max_bad_rows=data.max_bad_rows,
            workers=data.workers,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
