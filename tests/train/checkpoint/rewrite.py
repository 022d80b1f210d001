"""A manifest that was changed on purpose: its hash is right again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from shoal.train.checkpoint.manifest import NAME

Content = dict[str, Any]


def rewrite(saved: Path, change: Callable[[Content], object]) -> None:
    """Somebody who knows the format changes the manifest, and its hash."""
    content = json.loads((saved / NAME).read_text())
    del content["hash"]
    change(content)
    (saved / NAME).write_text(signed(content))


def signed(content: Content) -> str:
    text = json.dumps(content, separators=(",", ":"))
    both = {**content, "hash": blake3(text.encode()).hexdigest()}
    return json.dumps(both, separators=(",", ":")) + "\n"
