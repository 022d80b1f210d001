"""The store that launchers and ranks share, with a signature on every value.

A TCPStore answers anyone who reaches its port, and on loopback that is every user of the machine. So each value we
write carries an HMAC of its key and content, made with a secret that never passes through the store, and we accept only
values whose signature matches. Each rendezvous draws a new secret, and the keys of each attempt have their own prefix,
so no value of an earlier attempt passes for one of this attempt.

Other processes can still overwrite and delete. A foreign value counts as missing. A process that waits restores what it
has written itself, and gives up if that goes on for longer than ``fault.timeout``.

torch's own keys (gloo, NCCL, process groups) are in ``plain`` and cannot be signed.
"""

from __future__ import annotations

import hmac
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

SECRET_BYTES = 32
SIGNATURE = 64  # hexadecimal digits
# Never one of our values: the store returns it for a key that is missing.
NOTHING = "nothing"
# Pause between two polls, as a fraction of the time already waited (short waits poll often), and its shortest and
# longest value in seconds.
OF_THE_WAIT, SHORTEST, LONGEST = 0.05, 0.001, 0.25
# Above this many waiting processes each polls less often, because one thread answers them all.
LOOKING_AT_ONCE = 1024
# Seconds between two checks of the values we wrote ourselves, and how many we check.
LOOK_AFTER_SECONDS = 1.0
KEPT = 16


class Tampered(RuntimeError):
    """A foreign process keeps writing to the store."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"{key} of the run's store keeps being overwritten or deleted by a process that is not part of this "
            "run: another user of this machine, or of its network; see docs/security.md"
        )


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


@dataclass
class _Shared:
    """What a store and the stores within it share."""

    secret: bytes
    timeout: float
    longest: float = LONGEST
    say: Callable[[str], None] = _say
    said: bool = False
    # The values we wrote last, by full key: the store, the key in it, and the value.
    kept: dict[str, tuple[dist.Store, str, str]] = field(default_factory=dict)
    series: dict[str, list[str]] = field(default_factory=dict)
    looked_after: float = 0.0
    missing_since: float | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)


class SignedStore:
    """A map from keys to texts. Only methods that say so wait."""

    def __init__(self, plain: dist.Store, secret: bytes, timeout: float = 60.0) -> None:
        """``plain`` is for what cannot be signed: torch's own keys.

        ``timeout``: seconds for which a foreign process may keep our own values from us.
        """
        self.plain = plain
        self.prefix = ""
        self._shared = _Shared(secret, timeout)

    @property
    def secret(self) -> bytes:
        """The secret. Pass it to processes of this run, never through a store, the environment or an open file."""
        return self._shared.secret

    def within(self, name: str) -> SignedStore:
        """A store within this one, with its own key prefix."""
        part = SignedStore(dist.PrefixStore(name, self.plain), b"")
        part.prefix, part._shared = f"{self.prefix}{name}/", self._shared
        return part

    def shared_by(self, processes: int) -> None:
        """How many processes wait for what others write here."""
        self._shared.longest = LONGEST * max(1.0, processes / LOOKING_AT_ONCE)

    def on_forgery(self, say: Callable[[str], None]) -> None:
        """Call ``say`` once, when a foreign process is found to write here."""
        self._shared.say = say

    # Writing.

    def set(self, key: str, text: str, series: str | None = None) -> None:
        """Write a value. Only the last two of a ``series`` are kept: every process must have read a value before the
        next but one is written.
        """
        shared, whole, signed = self._shared, self.prefix + key, self._signed(key, text)
        with shared.lock:
            shared.kept.pop(whole, None)
            shared.kept[whole] = (self.plain, key, signed)
            for old in [*shared.kept][:-KEPT]:
                del shared.kept[old]
        self.plain.set(key, signed)
        if series is not None:
            keys = shared.series.setdefault(self.prefix + series, [])
            keys.append(key)
            for old in keys[:-2]:
                self.delete(old)
            del keys[:-2]

    def delete(self, key: str) -> None:
        """Delete one of our own keys."""
        with self._shared.lock:
            self._shared.kept.pop(self.prefix + key, None)
        self.plain.delete_key(key)

    def claim(self, key: str, text: str) -> bool:
        """Set a key unless a process of this run has; returns whether we set it."""
        found, signed = self._look(key), self._signed(key, text)
        if found is not None and self._opened(key, found) is not None:
            return False
        # A foreign value need not be text, and may be returned all the same.
        now: Any = self.plain.compare_set(key, cast(str, found or ""), signed)
        return bytes(now) == signed.encode()

    def look_after(self) -> None:
        """Restore values of ours that a foreign process deleted or overwrote. Call it often while waiting."""
        shared, now = self._shared, time.monotonic()
        with shared.lock:
            if now - shared.looked_after < LOOK_AFTER_SECONDS:
                return
            shared.looked_after, missing = now, ""
            for whole, (plain, key, signed) in [*shared.kept.items()]:
                found = _current(plain, key)
                if found is None or self._content(whole, found) is None:
                    plain.set(key, signed)
                    missing = whole
            shared.missing_since = (shared.missing_since or now) if missing else None
            if missing:
                self._say_once(missing)
                if now - (shared.missing_since or now) > shared.timeout:
                    raise Tampered(missing)

    # Reading.

    def read(self, key: str) -> str | None:
        """The value; None if there is none, or none of ours."""
        return self.look(key)[0]

    def look(self, key: str) -> tuple[str | None, bool]:
        """Like ``read``, and whether a foreign process has written there."""
        found = self._look(key)
        text = None if found is None else self._opened(key, found)
        return text, found is not None and text is None

    def strange(self, key: str) -> bool:
        """Whether a foreign process has written there."""
        return self.look(key)[1]

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        """Like ``read`` for several keys, in two messages; one message per key if any is missing."""
        if not keys:
            return []
        found: Iterable[bytes | None]
        try:
            # Check first: ``multi_get`` waits for missing keys.
            found = (
                self.plain.multi_get(list(keys)) if self.plain.check(list(keys)) else map(self._look, keys)
            )
        except dist.DistStoreError:  # deleted between the two
            found = map(self._look, keys)
        return [
            None if value is None else self._opened(key, bytes(value))
            for key, value in zip(keys, found, strict=True)
        ]

    def has(self, key: str) -> bool:
        return self.read(key) is not None

    def wait(self, key: str, patience: timedelta) -> str:
        """Wait for a value and return it. Raises ``DistStoreError`` if none comes, ``Tampered`` if a foreign process
        prevents it.
        """
        return self.wait_for([key], patience)[0]

    def wait_for(self, keys: Sequence[str], patience: timedelta) -> list[str]:
        began = time.monotonic()
        strange_since: float | None = None
        texts: list[str] = []
        while len(texts) < len(keys):
            key = keys[len(texts)]
            found = self._look(key)
            text = None if found is None else self._opened(key, found)
            if text is not None:
                texts.append(text)
                strange_since = None
                continue
            now = time.monotonic()
            strange_since = (strange_since or now) if found is not None else strange_since
            if strange_since is not None and now - strange_since > self._shared.timeout:
                raise Tampered(self.prefix + key)
            if now - began > patience.total_seconds():
                raise dist.DistStoreError(
                    f"{self.prefix}{key} did not come within {patience.total_seconds():g} s"
                )
            self.look_after()
            time.sleep(min(max(OF_THE_WAIT * (now - began), SHORTEST), self._shared.longest))
        return texts

    def _look(self, key: str) -> bytes | None:
        return _current(self.plain, key)

    def _opened(self, key: str, found: bytes) -> str | None:
        text = self._content(self.prefix + key, found)
        if text is None:
            self._say_once(self.prefix + key)
        return text

    # Signatures.

    def _signed(self, key: str, text: str) -> str:
        return _signature(self.secret, self.prefix + key, text.encode()) + text

    def _content(self, whole: str, found: bytes) -> str | None:
        """The text of a value; None if its signature is not ours or not for that key."""
        signature, content = found[:SIGNATURE], found[SIGNATURE:]
        if not hmac.compare_digest(signature, _signature(self.secret, whole, content).encode()):
            return None
        return content.decode()

    def _say_once(self, whole: str) -> None:
        shared = self._shared
        if not shared.said:
            shared.said = True
            shared.say(
                f"a process that is not part of this run writes to its store ({whole!r}); its writes are ignored: "
                "docs/security.md"
            )


def _signature(secret: bytes, whole: str, content: bytes) -> str:
    name = whole.encode()
    return hmac.digest(secret, b"%d:%s:%s" % (len(name), name, content), "sha256").hex()


def _current(plain: dist.Store, key: str) -> bytes | None:
    """The value that is there now. ``get`` would wait for a missing one, also if it was deleted a moment ago."""
    found = bytes(plain.compare_set(key, NOTHING, NOTHING))
    return None if found == NOTHING.encode() else found
