"""One self-contained HTML page: styles, scripts and data inside, nothing fetched. All page-level escaping is here."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"
# What every page with a curve needs.
CHARTS = ("uplot.min.js", "charts.js")


@cache
def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def page(
    title: str,
    body: str,
    data: dict[str, Any] | None = None,
    scripts: Sequence[str] = CHARTS,
    connects: bool = False,
) -> str:
    """``body`` is markup whose texts are escaped already; ``scripts`` are our own files, which read ``data``.

    The content security policy names each script by its hash, so that a browser runs only these, whatever a log line
    contains. ``connects``: the page may poll the server it came from.
    """
    texts = [asset(name) for name in scripts]
    hashes = " ".join(f"'sha256-{_hash(text)}'" for text in texts)
    asks = "'self'" if connects else "'none'"
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}; "
        f"connect-src {asks}; base-uri 'none'; form-action 'none'"
    )
    styles = [asset("page.css")]
    if "uplot.min.js" in scripts:
        styles.insert(0, asset("uplot.min.css"))
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{escape(title)}</title>" + "".join(f"<style>{style}</style>" for style in styles)
    )
    told = f'<script type="application/json">{embedded(data or {})}</script>'
    ours = "".join(f"<script>{text}</script>\n" for text in texts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n{told}\n{ours}</body></html>\n'


def embedded(value: Any) -> str:
    """JSON that cannot end a script or begin a tag, whatever it contains."""
    text = json.dumps(plain(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def plain(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
