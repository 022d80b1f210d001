"""A console that prints untrusted text as text: only rich's own control sequences reach the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich import console
from rich.segment import Segment

from shoal.facts.redact import printable


class Console(console.Console):
    """Cleans what it prints: a name, a path or a row of data may contain anything, such as codes that erase earlier
    lines.
    """

    @property
    def file(self) -> IO[str]:
        """The stream behind any text-cleaning stream, for a live line too: all codes that pass here are rich's."""
        found = super().file
        while (inner := getattr(found, "rich_proxied_file", None)) is not None:
            found = inner
        return found

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(
        self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
