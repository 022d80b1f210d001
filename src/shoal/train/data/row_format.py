"""Documents of rows: what of a row, an object, is text, and what of the text a model learns to write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shoal.facts.problem import BadInput
from shoal.train.data.conversations import CONVERSATIONS, PAIRS, read_chat, read_pair
from shoal.train.data.templates import CLOSE, OPEN, ChatTemplate, Unrendered, find_template
from shoal.train.data.tokenizers import FileTokenizer, Tokenizer

EMPTY = "empty"  # the reason of a row that is there and has no text


@dataclass(frozen=True)
class SourceText:
    """A text; ``answers``: the ranges of its characters that are learned, None: all of it."""

    text: str
    answers: tuple[tuple[int, int], ...] | None = None
    conversation: bool = False  # it has its own end, where its template gives it one


@dataclass(frozen=True)
class RowFormat:
    """How a row is read. It can be sent to another process."""

    field: str = "text"
    format: Literal["text", "chat", "prompt"] = "text"
    template: ChatTemplate | None = None
    answers_only: bool = False

    def document(self, row: dict[str, Any]) -> SourceText | str:
        """The row's document, or why it has none."""
        found = self._text(row) if self.template is None else self._conversation(row, self.template)
        if isinstance(found, str):
            return found
        if not found.text:
            return EMPTY
        return found if _encodable(found.text) else "invalid UTF-8"

    def key(self) -> list[Any]:
        """What documents depend on. A plain text's is its field alone, as it was before there were others."""
        if self.template is None:
            return [self.field]
        return [self.field, self.format, self.template.source, self.template.tokens, self.answers_only]

    def _text(self, row: dict[str, Any]) -> SourceText | str:
        if self.field not in row:
            return f"no field {self.field!r}{_other_format(row)}"
        text = row[self.field]
        return SourceText(text) if isinstance(text, str) else f"field {self.field!r} is not a text"

    def _conversation(self, row: dict[str, Any], template: ChatTemplate) -> SourceText | str:
        messages = read_chat(row, self.field) if self.format == "chat" else read_pair(row)
        if isinstance(messages, str):
            return messages
        if any(mark in str(message.get("content")) for message in messages for mark in (OPEN, CLOSE)):
            return "a character that no text may hold"
        try:
            text, answers = template.render(messages, row.get("tools"))
        except Unrendered as error:
            return str(error)
        return SourceText(text, answers if self.answers_only else None, conversation=True)


def row_format(
    tokenizer: Tokenizer,
    end_token: str | None,
    field: str,
    format: Literal["text", "chat", "prompt"],
    template: str,
    loss_on: Literal["answers", "all"] | None,
) -> RowFormat:
    """As a config says it; BadInput where a template is needed and there is none."""
    if format == "text":
        if loss_on == "answers":
            raise BadInput(
                'data.loss_on = "answers" with data.format = "text": a text has no answers',
                'data.format = "chat" or "prompt", or data.loss_on = "all"',
            )
        return RowFormat(field)
    if format == "chat" and template == "none":
        raise BadInput(
            'data.template = "none" with data.format = "chat": nothing would tell the roles apart',
            'data.template = "auto", or a file; "none" is for data.format = "prompt"',
        )
    directory = tokenizer.path.parent if isinstance(tokenizer, FileTokenizer) else None
    found = find_template(template, directory, end_token)
    return RowFormat(field, format, found, loss_on != "all")


def _other_format(row: dict[str, Any]) -> str:
    if any(name in row for name in CONVERSATIONS):
        return '; data.format = "chat" reads such rows'
    if any(pair[0] in row and pair[1] in row for pair in PAIRS):
        return '; data.format = "prompt" reads such rows'
    return ""


def _encodable(text: str) -> bool:
    """JSON can write half a surrogate pair (``"\\ud800"``), which no UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
