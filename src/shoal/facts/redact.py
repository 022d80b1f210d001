"""Redact secrets from everything that Shoal writes or prints.

A secret is recognised by name (environment variables such as ``HF_TOKEN``), by position (a password in a URL, a
signature in its query, ``password=…``) or by form (``ghp_…``, a JSON web token, a private key). Hashes, numbers and
paths match none of these and are kept.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

REDACTED = "[redacted]"

# A shorter value could be any word or number.
SHORTEST = 8
# Next to its name, this length is enough.
SHORTEST_NAMED = 6
# From this length on, a value counts as a secret even inside other text, or with characters of a single class.
LONG = 16

# Words in a variable's name.
_SECRET_WORDS = {
    *("TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "PASS", "PWD", "CREDENTIAL", "CREDENTIALS"),
    *("AUTH", "AUTHORIZATION", "APIKEY", "JWT", "COOKIE", "SAS"),
}  # fmt: skip
_SECRET_PARTS = ("SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "APIKEY")
_SECRET_KEY = re.compile(r"(?:^|_)KEYS?(?:_ID|_DATA|_JSON|_BASE64|_B64|_VALUE)?$")
# Variables about a secret that do not contain it.
_HARMLESS = re.compile(
    r"^(?:OLD)?PWD$|_(?:FILE|FILES|PATH|DIR|SOCK|SOCKET|URL|URI|HOST|PORT|USER|USERNAME|NAME|TYPE|METHOD|MODE|ENDPOINT"
    r"|REGION|TTL|TIMEOUT|EXPIRES|EXPIRY|EXPIRATION)$"
)

# A backslash binds the next character: in JSON and Python literals an escaped quotation mark ends nothing.

# ``user:password@``. A colon followed by a number is a port, and a later @ belongs to a path.
_IN_URL = re.compile(r"""(?<=://)[^\s/:@"'<>\[]{0,256}:(?!\d{1,5}(?:[/?#]|$))((?:\\.|[^\s\\"'<>]){0,512})@""")
_IN_QUERY = re.compile(
    r"""(?i)(?:(?<=[?&;])|(?<=::))
    (x-(?:amz|goog)-(?:signature|credential|security-token) | sig | signature | sas | token | (?:access|auth|id)_?token
    | auth | code | key | (?:api|access|account)_?key | awsaccesskeyid | password | passwd | pwd | secret | credential)
    =(?:\\.|[^\s\\&;\#"'<>])+""",
    re.VERBOSE,
)
_HEADER = re.compile(
    r"""(?i)\b(authorization["']?\s{0,4}[:=]\s{0,4}["']?(?:(?:bearer|basic|token|digest)\s{1,4})?)[A-Za-z0-9._~+/=-]{8,}"""
)
# A name and its separator: ``HF_TOKEN=``, ``"password": "``; and the value: one that continues with a bracket is code
# that computes it.
_NAME = re.compile(r"""(?<![A-Za-z0-9_-])([A-Za-z][A-Za-z0-9_-]{2,}+)["']?\s{0,4}[:=]\s{0,4}["']?""")
_VALUE = re.compile(r"""(?:\\.|[^\s\\"'`,;&<>()\[\]{}]){6,}+(?![\[(])""")
# A JSON number stands without quotes and is not a secret; replacing it would break the JSON.
_JSON_NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|Infinity)")
# In lower case, "token" is an ordinary word of our field.
_SECRET_IN_TEXT = re.compile(
    r"password|passwd|passphrase|secret|(?:api|access|private|account)[_-]?key|(?:auth|access|refresh|bearer|api)[_-]?token",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"""
    -----BEGIN[ ](?:[A-Z]+[ ])*PRIVATE[ ]KEY-----
        (?: [A-Za-z0-9+/=\s\\:,-]{0,9999}?-----END[ ](?:[A-Z]+[ ])*PRIVATE[ ]KEY-----
          | (?:[\s\\nr]*[A-Za-z0-9+/=]{40,})* )
    | (?<![A-Za-z0-9])
    (?: hf_[A-Za-z0-9]{20,}
      | gh[oprsu]_[A-Za-z0-9]{20,} | github_pat_[A-Za-z0-9_]{20,} | glpat-[A-Za-z0-9_-]{16,}
      | sk-(?=[A-Za-z_-]*[0-9])(?:(?=[a-z0-9_-]*[A-Z])|(?=[a-z0-9]{20}))[A-Za-z0-9_-]{20,}
      | (?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])
      | xox[abeprs]-[A-Za-z0-9-]{10,} | AIza[A-Za-z0-9_-]{30,} | ya29\.[A-Za-z0-9_-]{20,}
      | (?:npm|dckr_pat)_[A-Za-z0-9_-]{20,} | pypi-AgE[A-Za-z0-9_-]{20,}
      | eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+
    )""",
    re.VERBOSE,
)


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable's name indicates a secret: ``HF_TOKEN`` does, ``TOKENIZERS_PARALLELISM`` does not."""
    name = name.upper()
    if _HARMLESS.search(name):
        return False
    if set(name.split("_")) & _SECRET_WORDS or _SECRET_KEY.search(name):
        return True
    return name.endswith("TOKEN") or any(part in name for part in _SECRET_PARTS)


def holds_password(value: str) -> bool:
    """Whether a URL contains credentials: a password, or a signature that is as good as one."""
    return bool(re.search("://|::", value) and (_IN_URL.search(value) or _IN_QUERY.search(value)))


def harmless(value: str) -> str:
    """The part of a rejected value that may be shown: a plain name or path, and nothing more."""
    plain = re.match(r"[\w./~ -]{0,60}(?:://[\w./~ -]{0,60})?", value)
    shown = plain[0] if plain else ""
    # Before an @ there is a user name, and possibly a password.
    if "@" in value:
        shown = value.partition("://")[0] if "://" in value[: len(shown) + 3] else ""
    return repr(shown if shown == value else f"{shown}…")


class Redactor:
    """Removes secrets from text. It reads them from an environment once, so it can be reused."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """``environment``: by default this process's."""
        secrets = set(_secrets(os.environ if environment is None else environment))
        # Longest first, since one may contain another.
        known = sorted(secrets, key=len, reverse=True)
        self._known = re.compile("|".join(map(_found_as, known))) if known else None

    def text(self, text: str) -> str:
        """``text`` without secrets."""
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        text = _SHAPES.sub(REDACTED, text)
        if "://" in text:
            text = _IN_URL.sub(f"{REDACTED}@", text)
        if "=" in text or ":" in text:
            text = _IN_QUERY.sub(rf"\1={REDACTED}", text)
            text = _HEADER.sub(rf"\1{REDACTED}", text)
            text = _without_named(text)
        return text

    def values(self, value: Any) -> Any:
        """The same dictionaries and lists with every text redacted; numbers are not secret."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.values(key): self.values(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.values, value)) if type(value) in (list, tuple) else value
        return value


def redact(text: str) -> str:
    """``text`` without known or suspected secrets."""
    return Redactor().text(text)


def redact_values(value: Any) -> Any:
    """The same for every text in dictionaries and lists."""
    return Redactor().values(value)


def _secrets(environment: Mapping[str, str]) -> Iterator[str]:
    """The environment's secrets, in every form in which they may be written."""
    for name, value in environment.items():
        found = [value] if is_secret_name(name) and not _is_path(value) else []
        if "://" in value:
            found += [match[1] for match in _IN_URL.finditer(value)]
        for secret in found:
            # A file's content would be printed line by line.
            lines = [line.strip() for line in secret.splitlines() if not line.startswith("-----")]
            for text in {secret.strip(), *(line for line in lines if len(line) >= LONG)}:
                if _is_hard_to_guess(text, SHORTEST):
                    yield from {text, json.dumps(text)[1:-1], quote(text, safe="")}


def _is_hard_to_guess(value: str, shortest: int) -> bool:
    """Whether it is not an ordinary word or number, which would match any output."""
    kinds = (str.islower, str.isupper, str.isdigit, lambda letter: not letter.isalnum())
    several = sum(any(map(kind, value)) for kind in kinds) > 1
    return len(value) >= LONG or (len(value) >= shortest and several)


def _is_path(value: str) -> bool:
    """GOOGLE_APPLICATION_CREDENTIALS names a file. Since a key may begin with a slash too, the file must exist."""
    try:
        return value.startswith(("/", "~")) and Path(value).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _found_as(secret: str) -> str:
    if len(secret) >= LONG:
        return re.escape(secret)
    return rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])"


def _without_named(text: str) -> str:
    """``text`` without values next to a secret's name."""
    parts, done = [], 0
    for match in _NAME.finditer(text):
        name, start = match[1], match.end()
        secret = is_secret_name(name) if name.isupper() else _SECRET_IN_TEXT.search(name)
        value = _VALUE.match(text, start) if secret and start >= done else None
        if value is None or value[0] == name or not _is_hard_to_guess(value[0], SHORTEST_NAMED):
            continue
        if match[0].rstrip().endswith('":') and _JSON_NUMBER.fullmatch(value[0]):
            continue
        # ``secret_key=self.secret_key`` is code, as quoted in tracebacks.
        if "." in value[0] and value[0].replace(".", "_").isidentifier():
            continue
        parts += [text[done:start], REDACTED]
        done = value.end()
    return "".join([*parts, text[done:]])


# Control codes of both sets, except line break and tab; and marks that change the writing direction.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """``text`` with every control code written out: ``\\x1b`` for the one that begins a terminal's commands."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
