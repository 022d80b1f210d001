"""Documents of rows: which part of a row (an object) is text, and which part of the text is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shoal.facts.losses import Format
from shoal.facts.problem import BadInput
from shoal.train.data.conversations import (
    ANSWERS,
    CHOICES,
    CONVERSATIONS,
    PAIRS,
    SAME,
    Message,
    learned,
    read_chat,
    read_pair,
    read_preference,
    read_tools,
)
from shoal.train.data.templates import CLOSE, OPEN, ChatTemplate, Unrendered, find_template
from shoal.train.data.tokenizers import FileTokenizer, Tokenizer

CONVERSATION_FORM = 2  # increment whenever a row's tokens or answers change
EMPTY = "empty"  # the reason for a row without text


@dataclass(frozen=True)
class SourceText:
    """A text; ``answers``: ranges of its characters that are trained on, None: all of it."""

    text: str
    answers: tuple[tuple[int, int], ...] | None = None
    conversation: bool = False  # it has its own end token, if its template adds one


@dataclass(frozen=True)
class RowFormat:
    """How rows are read. Picklable for worker processes."""

    field: str = "text"
    format: Format = "text"
    template: ChatTemplate | None = None
    answers_only: bool = False

    def documents(self, row: dict[str, Any]) -> tuple[SourceText, ...] | str:
        """The row's document, or both of a pair, chosen first; or why it has none."""
        found = self._found(row)
        if isinstance(found, str):
            return found
        if not all(one.text for one in found):
            return EMPTY
        return found if all(_encodable(one.text) for one in found) else "invalid UTF-8"

    @property
    def pairs(self) -> bool:
        """Whether documents come in pairs."""
        return self.format == "preference"

    def key(self) -> list[Any]:
        """What documents depend on. For plain text only the field, as before other formats existed."""
        if self.template is None:
            return [self.field]
        template = self.template.source, self.template.tokens
        return [CONVERSATION_FORM, self.field, self.format, *template, self.answers_only]

    def _found(self, row: dict[str, Any]) -> tuple[SourceText, ...] | str:
        if self.template is None:
            text = self._text(row)
            return text if isinstance(text, str) else (text,)
        if self.pairs:
            return self._pair(row, self.template)
        messages = read_chat(row, self.field) if self.format == "chat" else read_pair(row)
        if isinstance(messages, str):
            return f"{messages}{_other_format(row, self.format)}"
        document = self._conversation(messages, row, self.template)
        return document if isinstance(document, str) else (document,)

    def _pair(self, row: dict[str, Any], template: ChatTemplate) -> tuple[SourceText, ...] | str:
        read = read_preference(row)
        if isinstance(read, str):
            return read
        (chosen, rejected), common = read
        before = sum(message["role"] == ANSWERS for message in chosen[:common])
        pair = []
        for messages in (chosen, rejected):
            document = self._conversation(messages, row, template, before)
            if isinstance(document, str):
                return document
            pair.append(document)
        return tuple(pair) if pair[0].text != pair[1].text else SAME

    def _text(self, row: dict[str, Any]) -> SourceText | str:
        if self.field not in row:
            return f"no field {self.field!r}{_other_format(row, self.format)}"
        text = row[self.field]
        return SourceText(text) if isinstance(text, str) else f"field {self.field!r} is not a text"

    def _conversation(
        self, messages: list[Message], row: dict[str, Any], template: ChatTemplate, before: int = 0
    ) -> SourceText | str:
        """``before``: how many of its answers belong to the prompt."""
        if any(mark in str(message.get("content")) for message in messages for mark in (OPEN, CLOSE)):
            return "a character that no text may hold"
        try:
            text, answers = template.render(messages, read_tools(row))
        except Unrendered as error:
            return str(error)
        except ValueError:
            return "'tools' is not JSON"
        said = [learned(message) for message in messages if message["role"] == ANSWERS]
        if len(said) == len(answers):
            answers = tuple(span for span, counts in zip(answers, said, strict=True) if counts or self.pairs)
        elif self.answers_only and not all(said):
            return "the template's marks do not tell which answer has no weight"
        return SourceText(text, answers[before:] if self.answers_only else None, conversation=True)


def row_format(
    tokenizer: Tokenizer,
    end_token: str | None,
    field: str,
    format: Format,
    template: str,
    loss_on: Literal["answers", "all"] | None,
) -> RowFormat:
    """The format that a config describes; BadInput if it needs a template and there is none."""
    if format == "text":
        if loss_on == "answers":
            raise BadInput(
                'data.loss_on = "answers" with data.format = "text": a text has no answers',
                'data.format = "chat" or "prompt", or data.loss_on = "all"',
            )
        return RowFormat(field)
    if format == "preference" and loss_on == "all":
        raise BadInput(
            'data.loss_on = "all" with data.format = "preference": what is compared is the answers',
            'leave data.loss_on out, or data.loss_on = "answers"',
        )
    if format == "chat" and template == "none":
        raise BadInput(
            'data.template = "none" with data.format = "chat": nothing would tell the roles apart',
            'data.template = "auto", or a file; "none" is for data.format = "prompt"',
        )
    directory = tokenizer.path.parent if isinstance(tokenizer, FileTokenizer) else None
    found = find_template(template, directory, end_token)
    return RowFormat(field, format, found, loss_on != "all")


def _other_format(row: dict[str, Any], format: Format) -> str:
    """The format that would read a row which this one does not, if there is one."""
    found: Format | None = None
    if all(name in row for name in CHOICES):
        found = "preference"
    elif any(name in row for name in CONVERSATIONS):
        found = "chat"
    elif any(pair[0] in row and pair[1] in row for pair in PAIRS):
        found = "prompt"
    return "" if found in (None, format) else f'; data.format = "{found}" reads such rows'


def _encodable(text: str) -> bool:
    """Whether UTF-8 can hold the text: JSON can encode half a surrogate pair, which UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
