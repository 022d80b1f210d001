"""The store that launchers and ranks share, with a signature on every value.

A TCPStore answers everyone who reaches its port, and on loopback that is every user of the machine. So what we write
there carries an HMAC of its key and its content, under a secret that never passes through the store, and what we read
counts only with it. A secret is drawn for every meeting and the keys of an attempt have a prefix of its own, so no
value of an earlier attempt passes for one of this.

Other processes can still overwrite and delete. A value that is not ours counts as none. A process that waits looks
after what it has written itself, and gives up where that goes on for longer than ``fault.timeout``.

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
# What no value of ours is: a question for a key that is not there is answered with it.
NOTHING = "nothing"
# Between two looks, of the time already waited: so it is short for short waits; and no longer than the last of these.
OF_THE_WAIT, SHORTEST, LONGEST = 0.05, 0.001, 0.25
# Of so many processes that wait; of more each looks less often, for one thread answers them all.
LOOKING_AT_ONCE = 1024
# Between two looks at what we wrote ourselves, and how much of it we look at.
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
    """What a store and its parts have in common."""

    secret: bytes
    timeout: float
    longest: float = LONGEST
    say: Callable[[str], None] = _say
    said: bool = False
    # The last values that we wrote, by their whole keys: where, under which key there, and what.
    kept: dict[str, tuple[dist.Store, str, str]] = field(default_factory=dict)
    series: dict[str, list[str]] = field(default_factory=dict)
    looked_after: float = 0.0
    missing_since: float | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)


class SignedStore:
    """Texts under keys. No method waits but those that say so."""

    def __init__(self, plain: dist.Store, secret: bytes, timeout: float = 60.0) -> None:
        """``plain`` is for what cannot be signed: torch's own keys.

        ``timeout``: seconds for which a foreign process may keep us from our own values.
        """
        self.plain = plain
        self.prefix = ""
        self._shared = _Shared(secret, timeout)

    @property
    def secret(self) -> bytes:
        """To be given to processes of this run, and never by way of a store, the environment or an open file."""
        return self._shared.secret

    def within(self, name: str) -> SignedStore:
        """A part of it, with keys of its own."""
        part = SignedStore(dist.PrefixStore(name, self.plain), b"")
        part.prefix, part._shared = f"{self.prefix}{name}/", self._shared
        return part

    def shared_by(self, processes: int) -> None:
        """How many wait for what others write here."""
        self._shared.longest = LONGEST * max(1.0, processes / LOOKING_AT_ONCE)

    def on_forgery(self, say: Callable[[str], None]) -> None:
        """What to do, once, when a foreign process is found to write here."""
        self._shared.say = say

    # Writing.

    def set(self, key: str, text: str, series: str | None = None) -> None:
        """Of a ``series`` the last two stay: to be used where everyone has read a value before the next but one."""
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
        """One of our own keys."""
        with self._shared.lock:
            self._shared.kept.pop(self.prefix + key, None)
        self.plain.delete_key(key)

    def claim(self, key: str, text: str) -> bool:
        """Set it unless a process of this run has; whether it was us."""
        found, signed = self._look(key), self._signed(key, text)
        if found is not None and self._opened(key, found) is not None:
            return False
        # A foreign value need not be text, and may be returned all the same.
        now: Any = self.plain.compare_set(key, cast(str, found or ""), signed)
        return bytes(now) == signed.encode()

    def look_after(self) -> None:
        """Restore what we wrote and a foreign process has deleted or overwritten. Call it often while waiting."""
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
        """None where there is nothing, or nothing of ours."""
        return self.look(key)[0]

    def look(self, key: str) -> tuple[str | None, bool]:
        """As ``read``, and whether a foreign process has written there."""
        found = self._look(key)
        text = None if found is None else self._opened(key, found)
        return text, found is not None and text is None

    def strange(self, key: str) -> bool:
        """Whether a foreign process has written there."""
        return self.look(key)[1]

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        """As ``read``, of several keys in two messages; where one of them is missing, in one for each."""
        if not keys:
            return []
        found: Iterable[bytes | None]
        try:
            # Asked first, for ``multi_get`` waits for what is not there.
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
        """What comes there. Raises ``DistStoreError`` where nothing does, ``Tampered`` where it is kept from us."""
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
        """The text of a value; None where its signature is not ours, or not for that key."""
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
    """What is there now. ``get`` would wait for what is not, also for what is deleted in the moment before."""
    found = bytes(plain.compare_set(key, NOTHING, NOTHING))
    return None if found == NOTHING.encode() else found
