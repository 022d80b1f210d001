"""A model directory's files beside its weights: config, generation config, tokenizer and template. Needs no torch.

The model's shape is the checkpoint's, and tokenizer and template are the run's. What neither says (the token that
begins a text, sampling defaults) comes from the model directory that the run started from, if there was one.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.facts.input.untrusted_files import parse_toml, read_json, read_settings
from shoal.facts.model import Model
from shoal.facts.model.huggingface import write_config
from shoal.facts.problem import BadInput
from shoal.train.checkpoint.manifest import Manifest
from shoal.train.data.tokenizers import Tokenizer, open_tokenizer
from shoal.train.huggingface import byte_tokenizer
from shoal.train.huggingface.turn_ends import turn_ends

# Files of a tokenizer; any of them may be missing.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
GENERATION = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Origin:
    """Where a run got what is not in its checkpoints."""

    tokenizer: str  # as in data.tokenizer
    end_token: str | None
    template: Path | None  # the run's own chat template
    models: tuple[Path, ...]  # model directories it started from; the first that has a file decides
    conversations: bool = False  # it was trained on answers, ended as its template does


def origin_of(manifest: Manifest, run: Path | None) -> Origin:
    """From the run's config or, for a checkpoint without a run, from its own manifest."""
    settings: dict[str, Any] = {}
    if run is not None and (run / "config.toml").is_file():
        try:
            settings = parse_toml(read_settings(run / "config.toml"))
        except (OSError, ValueError):
            settings = {}

    def said(section: str, name: str) -> str | None:
        table = settings.get(section)
        found = table.get(name) if isinstance(table, dict) else None
        found = manifest.identity.get(f"{section}.{name}") if found is None else found
        return found if isinstance(found, str) else None

    template = said("data", "template")
    paths = [Path(text).expanduser() for key in ("init_from", "path") if (text := said("model", key))]
    return Origin(
        said("data", "tokenizer") or "bytes",
        said("data", "end_token"),
        Path(template).expanduser() if template not in (None, "auto", "none") else None,
        tuple(path if path.is_dir() else path.parent for path in paths),
        template != "none" and _conversations(settings.get("data")),
    )


def _conversations(data: object) -> bool:
    """Whether the data, or a part of a mix, has answers."""
    if not isinstance(data, dict):
        return False
    parts = data.get("mix")
    rows = [data, *(parts if isinstance(parts, list) else [])]
    return any(isinstance(row, dict) and row.get("format", "text") != "text" for row in rows)


def more_ends(origin: Origin, tokenizer: Tokenizer) -> list[int]:
    """The tokens that end what the run was trained to write: a document, and an answer."""
    if not origin.conversations:
        return [tokenizer.end]
    return [tokenizer.end, *turn_ends(origin.template, tokenizer, origin.end_token)]


def write_side_files(into: Path, model: Model, dtype: str, origin: Origin) -> None:
    """Write all files except the weights. Bad input raises before any of them is written."""
    config = write_config(model)
    tokenizer = open_tokenizer(origin.tokenizer, origin.end_token)
    if tokenizer.vocab > model.vocab:
        raise BadInput(
            f"tokenizer {origin.tokenizer} has {tokenizer.vocab} tokens, {model.name} rows for {model.vocab}",
            "--tokenizer: the one that the run was trained with",
        )
    before = _first_json(origin, "config.json")
    ids = {key: before[key] for key in TOKEN_IDS if key in before}
    # Written even if null: some families assume ids beyond a small vocabulary.
    ids = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": tokenizer.end} | ids
    # transformers 5 reads ``dtype``, version 4 ``torch_dtype``.
    config |= {**ids, "dtype": dtype, "torch_dtype": dtype, "use_cache": True}
    generation = _first_json(origin, GENERATION) or {key: one for key, one in ids.items() if one is not None}
    _write_json(into / "config.json", config)
    _write_json(into / GENERATION, _stopping(generation, more_ends(origin, tokenizer)))
    if origin.tokenizer == "bytes":
        (into / "tokenizer.json").write_text(byte_tokenizer.tokenizer_json(), encoding="utf-8")
        settings = byte_tokenizer.tokenizer_config(model.max_positions)
        (into / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    else:
        _copy_tokenizer(into, Path(origin.tokenizer).expanduser(), origin, tokenizer.end)
    if origin.template is not None:
        _copy(origin.template, into / "chat_template.jinja")


def _stopping(generation: dict[str, Any], ends: list[int]) -> dict[str, Any]:
    """Keep the sampling settings, and also stop where the run's texts and answers end."""
    said = generation.get("eos_token_id")
    before = said if isinstance(said, list) else [] if said is None else [said]
    together = list(dict.fromkeys([*before, *ends]))
    if together == before:
        return generation
    return {**generation, "eos_token_id": together if len(together) > 1 else together[0]}


def _copy_tokenizer(into: Path, path: Path, origin: Origin, end: int) -> None:
    folder = path if path.is_dir() else path.parent
    for name in TOKENIZER_FILES:
        source = folder / name
        if name == "tokenizer.json" and not path.is_dir():
            source = path  # whatever its name
        if source.is_file():
            _copy(source, into / name)
    if not (into / "tokenizer_config.json").exists():
        content = read_json(into / "tokenizer.json", most=1 << 28)
        known = {**content.get("model", {}).get("vocab", {})} if isinstance(content, dict) else {}
        added = content.get("added_tokens", []) if isinstance(content, dict) else []
        names = {id: text for text, id in known.items()} | {one["id"]: one["content"] for one in added}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names.get(end)}
        _write_json(into / "tokenizer_config.json", settings)


def _first_json(origin: Origin, name: str) -> dict[str, Any]:
    for folder in origin.models:
        try:
            content = read_json(folder / name)
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            return content
    return {}


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise BadInput(f"cannot copy {source}: {error.strerror}", "check its permissions") from None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
