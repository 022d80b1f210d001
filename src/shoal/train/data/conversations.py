"""Rows of chat and instruction data: the common formats, read as one list of messages."""

from __future__ import annotations

import json
from typing import Any

ANSWERS = "assistant"  # the role whose messages a model learns to write
NO_ANSWER = "no answer"

# ShareGPT's role names; other names are passed to the template unchanged.
ROLES = {"human": "user", "gpt": ANSWERS, "bot": ANSWERS, "chatgpt": ANSWERS, "observation": "tool"}
# Fields that hold a conversation, a prompt, or an answer.
CONVERSATIONS = ("messages", "conversations", "conversation")
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("prompt", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("input", "output"),
)

Message = dict[str, Any]
SAME = "chosen and rejected are the same"
APART = "chosen and rejected differ before the answer"
# The two answers of a preference row.
CHOICES = ("chosen", "rejected")


def read_chat(row: dict[str, Any], field: str) -> list[Message] | str:
    """The messages of a row of ``format = "chat"``, or why it has none. ``field``: the field the user named."""
    name = field if field in row else next((name for name in CONVERSATIONS if name in row), None)
    if name is None:
        return f"no field {CONVERSATIONS[0]!r} or {CONVERSATIONS[1]!r}"
    messages = _checked(row[name], name)
    if isinstance(messages, str) or messages[0]["role"] == "system":
        return messages
    return [*_system(row), *messages]


def learned(message: Message) -> bool:
    """Whether to train on this answer: OpenAI's rows disable one with ``weight``, axolotl's with ``train``."""
    return message["role"] == ANSWERS and message.get("weight") != 0 and message.get("train") is not False


def read_tools(row: dict[str, Any]) -> Any:
    """The tools to pass to a template, often stored as JSON text; raises ValueError if that is invalid."""
    tools = row.get("tools")
    return (json.loads(tools) if tools.strip() else None) if isinstance(tools, str) else tools


def read_pair(row: dict[str, Any]) -> list[Message] | str:
    """Prompt and answer of a row of ``format = "prompt"`` as messages, or why it has none."""
    names = next((pair for pair in PAIRS if pair[0] in row and pair[1] in row), None)
    if names is None:
        return NO_ANSWER if any(pair[0] in row for pair in PAIRS) else "no prompt"
    prompt, answer = row[names[0]], row[names[1]]
    if isinstance(prompt, list) and isinstance(answer, list):
        return _checked([*prompt, *answer], names[1])
    if not (isinstance(prompt, str) and isinstance(answer, str)):
        return f"{names[0]!r} or {names[1]!r} is not a text"
    if not answer.strip():
        return NO_ANSWER
    more = row.get("input")
    if names[0] == "instruction" and isinstance(more, str) and more.strip():
        prompt = f"{prompt}\n\n{more}"
    return [*_system(row), {"role": "user", "content": prompt}, {"role": ANSWERS, "content": answer}]


def read_preference(row: dict[str, Any]) -> tuple[list[list[Message]], int] | str:
    """The two conversations of a row of ``format = "preference"``, chosen first, or why it has none.

    Also returns how many messages they share: the compared answers come after these.
    """
    found = []
    for name in CHOICES:
        messages = _answered(row, name)
        if isinstance(messages, str):
            return messages
        found.append(messages)
    chosen, rejected = found
    if chosen == rejected:
        return SAME
    common = 0
    while chosen[common : common + 1] == rejected[common : common + 1]:
        common += 1
    if any(one[common : common + 1] and one[common]["role"] != ANSWERS for one in found):
        return APART
    if not all(any(one["role"] == ANSWERS for one in messages[common:]) for messages in found):
        return APART
    return found, common


def _answered(row: dict[str, Any], name: str) -> list[Message] | str:
    """The prompt with one of its answers, whether the row has texts, messages, or the whole conversation."""
    answer, prompt = row.get(name), row.get("prompt")
    if answer is None:
        return f"no {name!r}"
    if isinstance(answer, str):
        if not answer.strip():
            return f"{name!r}: {NO_ANSWER}"
        if prompt is None:
            return f"{name!r} is a text, and there is no prompt"
        answer = [{"role": ANSWERS, "content": answer}]
    messages = _checked(answer, name)
    if isinstance(messages, str):
        return f"{name!r}: {messages}" if messages == NO_ANSWER else messages
    if messages[-1]["role"] != ANSWERS or not _says_something(messages[-1]):
        return f"{name!r}: {NO_ANSWER}"  # at its end
    if messages[0]["role"] != ANSWERS:
        return messages  # the whole conversation, whatever the row says about its prompt
    if isinstance(prompt, str):
        return [*_system(row), {"role": "user", "content": prompt}, *messages]
    before = _messages(prompt, "prompt")
    return before if isinstance(before, str) else [*before, *messages]


def _system(row: dict[str, Any]) -> list[Message]:
    """The system message that a row stores beside its conversation."""
    text = row.get("system")
    return [{"role": "system", "content": text}] if isinstance(text, str) and text else []


def _checked(value: Any, name: str) -> list[Message] | str:
    found = _messages(value, name)
    if isinstance(found, str):
        return found
    if not any(learned(message) and _says_something(message) for message in found):
        return NO_ANSWER
    return found


def _messages(value: Any, name: str) -> list[Message] | str:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return f"{name!r} is not a list of messages"
    messages = [_message(message) for message in value]
    if any(message is None for message in messages):
        return f"a message of {name!r} lacks its role or its content"
    return [message for message in messages if message is not None]


def _message(given: Message) -> Message | None:
    """A message with ``role`` and ``content``, plus anything else a template may use.

    Null fields are dropped: table rows, and answers of clients, have every field that any message has.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if "role" not in given and "from" in given:
        given = {"role": given["from"], "content": given.get("value")}
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or not isinstance(content, (str, list, type(None))):
        return None
    if content is None and "tool_calls" not in given:
        return None
    return {**given, "role": ROLES.get(role, role), "content": content}


def _says_something(message: Message) -> bool:
    content = message["content"]
    return bool(content.strip() if isinstance(content, str) else content or message.get("tool_calls"))
