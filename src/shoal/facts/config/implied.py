"""What a config means where it does not say it: text for a model's weights is tokenised with the model's tokenizer.

A run keeps what it meant when it began (``kept``): files that come later, or another version, change nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.facts.config import Config
from shoal.facts.input.untrusted_files import parse_toml, read_json, read_settings

TOKENIZER, WITHIN = "data.tokenizer", "data.within_documents"
# Where it may come from, in this order.
ORIGINS = ("model.init_from", "model.path")
FILE = "tokenizer.json"
# A tokenizer in another form, which has to be saved as a tokenizer.json first: bytes would mean nothing to the weights.
OTHER_FORMS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
# Of a tokenizer.json that is Shoal's own "bytes", as an export writes it: 256 bytes, an end, no merges.
BYTES_VOCAB, LARGEST_BYTES = 257, 1 << 15


def own_tokenizer(model: object) -> tuple[str, str] | None:
    """The key that implies a tokenizer, and the tokenizer: of the values of the table ``[model]``."""
    for key in ORIGINS:
        text = model.get(key.partition(".")[2]) if isinstance(model, dict) else None
        found = tokenizer_of(Path(text).expanduser()) if isinstance(text, str) and "\0" not in text else None
        if found is not None:
            return key, found
    return None


def tokenizer_of(path: Path) -> str | None:
    """That of a model directory (or the config.json in it), of a run or of a checkpoint; None: bytes, or none."""
    try:
        folder = path.parent if path.is_file() else path
        if (folder / FILE).is_file():
            return None if _is_bytes(folder / FILE) else str(folder)
        if any((folder / name).is_file() for name in OTHER_FORMS):
            return str(folder)
        run = folder.parent.parent if folder.name.startswith("step-") else folder
        said = parse_toml(read_settings(run / "config.toml")).get("data", {}).get("tokenizer")
    except (OSError, ValueError, AttributeError):
        return None
    return said if isinstance(said, str) and said != "bytes" else None


def lacks_tokenizer(path: Path) -> bool:
    """Whether it is a model directory that came without one."""
    return (path / "config.json").is_file() and not (path / FILE).is_file()


def _is_bytes(path: Path) -> bool:
    if path.stat().st_size > LARGEST_BYTES:
        return False
    try:
        model = read_json(path)["model"]
        return len(model["vocab"]) == BYTES_VOCAB and model["merges"] == []
    except (ValueError, KeyError, TypeError):
        return False


def kept(config: Config, said: dict[str, str], run: Path) -> Config:
    """With what the run in this directory began with, where ``said`` (keys that were written) has no word on it."""
    try:
        before: Any = parse_toml(read_settings(run / "config.toml")).get("data", {})
        tokenizer, within = before.get("tokenizer"), before.get("within_documents")
    except (OSError, ValueError, AttributeError):
        return config
    changes: dict[str, Any] = {}
    if isinstance(tokenizer, str) and said.get(TOKENIZER, ORIGINS[0]) in ORIGINS:
        changes["tokenizer"] = tokenizer
    if isinstance(within, bool) and WITHIN not in said:
        changes["within_documents"] = within
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})
