"""How long something took to be seen, by what is said of it."""

from __future__ import annotations

import re


def waited(text: str) -> int:
    """Seconds: more than needed, where the watcher has to wait for its turn on a busy machine."""
    found = re.search(r" for (\d+) s", text)
    assert found is not None, text
    return int(found[1])
