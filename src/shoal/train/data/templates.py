"""Chat templates: render a conversation as the text its model was made for, and locate the answers in it.

Templates are Jinja, stored beside a tokenizer. They come from strangers, so they run in Jinja's sandbox. Answers are
located without the template's help: renderings up to an answer, with and without the generation prompt, and with the
answer, are compared with the whole text. If a template marks answers itself (``{% generation %}``), its marks count.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.facts.input.untrusted_files import LARGEST_JSON, parse_json, read_bytes
from shoal.facts.problem import BadInput
from shoal.train.data.conversations import ANSWERS, Message

# Unicode guarantees that these are not characters.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
LONGEST_REASON = 100
OWN = 'data.template = "chat.jinja", a file of your own'


class Rendered(NamedTuple):
    """A conversation as text, and the character ranges that are answers."""

    text: str
    answers: tuple[tuple[int, int], ...]


class Unrendered(Exception):
    """The template cannot render a conversation; the message says why."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the names of special tokens that it may use. Picklable for worker processes."""

    source: str
    tokens: tuple[tuple[str, str], ...] = ()

    def render(self, messages: list[Message], tools: Any = None) -> Rendered:
        text = self._text(messages, tools)
        if OPEN in text:
            return _marked(text)
        answers = []
        floor = 0  # where the previous answer ended
        for number, message in enumerate(messages):
            if message["role"] == ANSWERS:
                span = self._answer(text, messages[: number + 1], tools, floor)
                answers.append(span)
                floor = span[1]
        return Rendered(text, tuple(answers))

    def prompt(self, messages: list[Message], tools: Any = None) -> str:
        """The text up to where an answer would begin."""
        return self._text(messages, tools, prompt=True).replace(OPEN, "").replace(CLOSE, "")

    def _answer(self, text: str, upto: list[Message], tools: Any, floor: int) -> tuple[int, int]:
        """The range in the whole text of the last of these messages, including the token that ends its turn."""
        content = upto[-1]["content"]
        words = content.strip() if isinstance(content, str) else ""
        asked, plain = ("", "")
        if len(upto) > 1:
            asked, plain = self._text(upto[:-1], tools, prompt=True), self._text(upto[:-1], tools)
        start = _common(text, asked)
        if start < floor:
            raise Unrendered("the template renders a turn otherwise when others follow it")
        found = text.find(words, start if start == len(asked) else floor) if words else -1
        if found >= 0 and (asked == plain or start < len(asked)):
            # There is no generation prompt, or the text does not continue from it: the answer begins with its own
            # words.
            start = found if asked == plain else min(start, found)
        alone = self._text(upto, tools)
        if text.startswith(alone):
            stop = len(alone)
        elif found >= 0 and words in alone:
            after = found + len(words)
            stop = after + _common(text[after:], alone[alone.rindex(words) + len(words) :])
        else:
            stop = _common(text, alone)
        after = found + len(words) if found >= 0 else start
        if text[after:stop].strip():
            stop = len(text[:stop].rstrip())  # what follows the end of a turn is never generated
        if not start < stop:
            raise Unrendered("the template leaves out an answer")
        return start, stop

    def _text(self, messages: list[Message], tools: Any, prompt: bool = False) -> str:
        try:
            return _compiled(self.source).render(
                messages=messages, tools=tools, add_generation_prompt=prompt, **dict(self.tokens)
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            RecursionError,
        ) as error:
            raise Unrendered(f"the template refuses it: {str(error)[:LONGEST_REASON]}") from None


def find_template(text: str, tokenizer: Path | None, end_token: str | None = None) -> ChatTemplate:
    """The template that ``data.template`` names: ``auto`` (the tokenizer's own), ``none`` (plain texts), or a file.

    ``tokenizer`` is the directory of its files; None if it has none.
    """
    settings = {} if tokenizer is None else _settings(tokenizer)
    tokens = {name: _content(value) for name, value in settings.items() if name.endswith("_token")}
    if end_token is not None:
        tokens["eos_token"] = end_token
    named = {name: value for name, value in tokens.items() if isinstance(value, str)}
    named = {"bos_token": "", "eos_token": "", **named}
    if text == "none":
        source = PLAIN
    elif text == "auto":
        source = _own_template(tokenizer, settings)
    else:
        source = _read(Path(text).expanduser())
    where = "the tokenizer's chat template" if text == "auto" else f"the template {text!r}"
    try:
        _compiled(source)
    except jinja2.TemplateError as error:
        raise BadInput(f"{where} is not Jinja: {error}", OWN) from None
    return ChatTemplate(source, tuple(sorted(named.items())))


def _own_template(tokenizer: Path | None, settings: dict[str, Any]) -> str:
    if tokenizer is None:
        raise BadInput(
            'the tokenizer "bytes" has no chat template', f'data.tokenizer = "MODEL", its directory; or {OWN}'
        )
    file = tokenizer / "chat_template.jinja"
    if file.is_file():
        return _read(file)
    found = settings.get("chat_template") or _json(tokenizer / "chat_template.json").get("chat_template")
    if isinstance(found, list):  # several named templates
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise BadInput(
            f"the tokenizer in {str(tokenizer)!r} has no chat template "
            "(neither chat_template.jinja nor a chat_template in tokenizer_config.json)",
            f"use the tokenizer of a chat model, or {OWN}",
        )
    return found


def _settings(tokenizer: Path) -> dict[str, Any]:
    return {**_json(tokenizer / "special_tokens_map.json"), **_json(tokenizer / "tokenizer_config.json")}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = parse_json(read_bytes(path, LARGEST_JSON))
    except (OSError, ValueError) as error:
        raise BadInput(f"{str(path)!r} cannot be read as JSON: {error}", "repair or remove it") from None
    return content if isinstance(content, dict) else {}


def _content(value: Any) -> Any:
    """Special tokens are texts, or objects that describe one."""
    return value.get("content") if isinstance(value, dict) else value


def _read(path: Path) -> str:
    try:
        return read_bytes(path, LARGEST_JSON).decode()
    except OSError as error:
        raise BadInput(f"cannot read data.template {str(path)!r}: {error.strerror}", OWN) from None
    except ValueError as error:
        raise BadInput(f"data.template {str(path)!r} is no text: {error}", OWN) from None


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}``: surrounds its content with marks."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's name for it)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return OPEN + caller() + CLOSE


@functools.lru_cache(8)
def _compiled(source: str) -> jinja2.Template:
    """Compile as ``transformers`` does, but with a fixed date: today's would produce a different dataset tomorrow."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _marked(text: str) -> Rendered:
    """The text without its marks, and the ranges they enclosed."""
    clean, answers = "", []
    for number, part in enumerate(text.replace(CLOSE, OPEN).split(OPEN)):
        if number % 2:  # text and answers alternate
            answers.append((len(clean), len(clean) + len(part)))
        clean += part
    return Rendered(clean, tuple(span for span in answers if span[0] < span[1]))


def _common(one: str, other: str) -> int:
    """The length of the common prefix."""
    if one.startswith(other):
        return len(other)
    return next(
        place for place, (mine, theirs) in enumerate(zip(one + "\0", other, strict=False)) if mine != theirs
    )
