"""Models of the Hugging Face Hub by name (``org/name``, ``org/name@revision``), if there is a network.

Files go to the cache that ``transformers`` uses. Only weights, configs, tokenizers and templates are downloaded, never
a repository's code.
"""

from __future__ import annotations

import re
from pathlib import Path

from shoal.facts.problem import BadInput, first_line

CONFIG = ("config.json",)
WEIGHTS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
# Common names of users' own folders, which no publisher uses.
_FOLDERS = ("model", "models", "weights", "runs", "checkpoints", "data", "out", "output", "outputs", "tmp")
_FILES = (".json", ".toml", ".safetensors", ".bin", ".jsonl", ".txt")


def is_hub_name(text: str, base: Path | None = None) -> bool:
    """Whether it names a Hub model: it looks like one, and neither it nor its first half exists here."""
    if not _NAME.fullmatch(text) or text.endswith(_FILES) or ".." in text:
        return False
    here, owner = base or Path.cwd(), text.partition("/")[0]
    return owner.lower() not in _FOLDERS and not (here / owner).exists()


def fetch(name: str, patterns: tuple[str, ...], newest: bool = True) -> Path:
    """The directory of a model's files, downloaded if missing. ``newest``: check for updates."""
    try:
        import huggingface_hub
    except ImportError:
        raise BadInput(
            f"{name!r} is no directory here, and to fetch it from the Hub needs the huggingface_hub package",
            "pip install huggingface_hub, or the path of a model directory",
        ) from None
    repository, _, revision = name.partition("@")

    def snapshot(local: bool) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision or None, allow_patterns=list(patterns), local_files_only=local
            )
        )

    try:
        if not newest:
            try:
                return snapshot(local=True)
            except Exception:  # noqa: S110 - not here yet: below it is fetched, or said why not
                pass
        return snapshot(local=False)
    except Exception as error:  # web clients raise any kind of exception
        raise BadInput(
            f"{name!r} is no directory here, and fetching it from the Hub failed: {first_line(error)}",
            "check the name, the network (HF_ENDPOINT) and access (HF_TOKEN); or give the path of a model directory",
        ) from None
