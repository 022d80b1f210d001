"""Implied settings: text for pretrained weights is tokenised with the model's own tokenizer.

A run keeps what was implied when it began (``kept``), unaffected by files added later or by another version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.facts.config import Config
from shoal.facts.input.untrusted_files import parse_toml, read_json, read_settings

TOKENIZER, WITHIN = "data.tokenizer", "data.within_documents"
# Where it may come from, in order of precedence.
ORIGINS = ("model.init_from", "model.path")
FILE = "tokenizer.json"
# Tokenizers in other formats, which must be converted to tokenizer.json first: with bytes the weights would be
# meaningless.
OTHER_FORMS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
# The size of a tokenizer.json that is Shoal's own "bytes", as written by an export: 256 bytes, an end token, no
# merges.
BYTES_VOCAB, LARGEST_BYTES = 257, 1 << 15


def own_tokenizer(model: object) -> tuple[str, str] | None:
    """The key that implies a tokenizer, and the tokenizer, from the values of the ``[model]`` table."""
    for key in ORIGINS:
        text = model.get(key.partition(".")[2]) if isinstance(model, dict) else None
        found = tokenizer_of(Path(text).expanduser()) if isinstance(text, str) and "\0" not in text else None
        if found is not None:
            return key, found
    return None


def tokenizer_of(path: Path) -> str | None:
    """The tokenizer of a model directory (or of the config.json in it), a run or a checkpoint; None: bytes, or none."""
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
    """Whether it is a model directory without a tokenizer."""
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
    """The config with the implied settings of this run directory, except for explicitly written keys (``said``)."""
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
