"""Tokenizers: plain bytes, which need no files, or a Hugging Face ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from blake3 import blake3

from shoal.facts.config.implied import OTHER_FORMS
from shoal.facts.input.untrusted_files import LARGEST_JSON, parse_json, read_bytes
from shoal.facts.problem import BadInput

# Usual names of the token that ends a document, tried in this order.
USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")

# The largest vocabularies take 40 MB.
LARGEST = 1 << 28
OTHER = "set data.tokenizer to 'bytes' or to the tokenizer.json of a Hugging Face model"


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab(self) -> int:
        """The largest id + 1."""

    @property
    def end(self) -> int:
        """The id that closes a document."""

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints give equal tokens."""

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """The ids of each text; nothing is added at either end."""

    def encode_placed(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The ids of each text, and the index of the character just after each."""

    def has_end(self, text: str) -> bool:
        """Whether a text ends in a special token, so that an end token should not be added."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


def open_tokenizer(text: str, end_token: str | None = None) -> Tokenizer:
    """The tokenizer that ``data.tokenizer`` names: ``bytes``, or the path of a ``tokenizer.json``."""
    if text == "bytes":
        return ByteTokenizer()
    path = Path(text).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
        others = [one for one in OTHER_FORMS if path.with_name(one).is_file()]
        if others and not path.is_file():
            raise BadInput(
                f"{text!r} has {others[0]} and no tokenizer.json, which is what is read",
                f"transformers.AutoTokenizer.from_pretrained({text!r}).save_pretrained({text!r}) writes one",
            )
    if not path.is_file():
        raise BadInput(
            f"there is no tokenizer at {str(path)!r}",
            "set data.tokenizer to 'bytes' or to the path of a tokenizer.json",
        )
    return FileTokenizer(path, end_token)


class ByteTokenizer:
    """Ids 0 to 255 are the UTF-8 bytes of the text; 256 ends a document."""

    vocab = 257
    end = 256
    fingerprint = blake3(b"bytes, 256 ends a document").hexdigest()

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        encoded = (text.encode() if isinstance(text, str) else text for text in texts)
        return [np.frombuffer(data, dtype=np.uint8).astype(np.uint16) for data in encoded]

    def encode_placed(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        found = []
        for ids in self.encode_batch(texts):
            # All bytes of a character end where the character does.
            begins = (ids & 0xC0) != 0x80
            found.append((ids, np.cumsum(begins)))
        return found

    def has_end(self, text: str) -> bool:
        return False

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes(int(token) for token in ids if int(token) < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A ``tokenizer.json``, run by the ``tokenizers`` package."""

    def __init__(self, path: Path, end_token: str | None = None) -> None:
        self.path = path
        content = _read(path, LARGEST)
        self._tokenizer = _load(path, content)
        # Files often carry the limits of the model they were made for. Documents are encoded whole.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise BadInput(f"{str(path)!r} has an empty vocabulary", OTHER)
        self.vocab = max(vocabulary.values()) + 1
        self.end = _find_end(path, vocabulary, end_token)
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._specials = {token.content: id for id, token in added if token.special}
        self.fingerprint = blake3(content + self.end.to_bytes(8, "little")).hexdigest()

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        decoded = [text.decode() if isinstance(text, bytes) else text for text in texts]
        encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_placed(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(one.ids, dtype=np.uint32), np.array([stop for _, stop in one.offsets], dtype=np.int64))
            for one in encodings
        ]

    def has_end(self, text: str) -> bool:
        return self.end_in(text) is not None

    def end_in(self, text: str) -> int | None:
        """The special token that a text ends with."""
        last = text.rstrip()
        found = max((one for one in self._specials if last.endswith(one)), key=len, default=None)
        return None if found is None else self._specials[found]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))


def _read(path: Path, most: int) -> bytes:
    try:
        return read_bytes(path, most)
    except OSError as error:
        raise BadInput(f"cannot read {str(path)!r}: {error.strerror}", "check its permissions") from None
    except ValueError as error:
        raise BadInput(f"{str(path)!r} is no tokenizer's: {error}", OTHER) from None


def _load(path: Path, content: bytes) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise BadInput(
            f"reading {str(path)!r} needs the tokenizers package",
            "pip install -e '.[hf]' in Shoal's checkout",
        ) from None
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package has no exception class of its own
        raise BadInput(
            f"{str(path)!r} is not a tokenizer.json: {error}",
            OTHER,
        ) from None


def _find_end(path: Path, vocabulary: dict[str, int], asked: str | None) -> int:
    """The token that ends a document: the user's choice, else what the files beside say, else a usual name."""
    if asked is not None:
        if asked not in vocabulary:
            raise BadInput(
                f"data.end_token {asked!r} is not in the vocabulary of {str(path)!r}",
                "set data.end_token to a token that is there",
            )
        return vocabulary[asked]
    for name in (_configured_end(path.with_name("tokenizer_config.json")), *USUAL_ENDS):
        if name is not None and name in vocabulary:
            return vocabulary[name]
    raise BadInput(
        f"{str(path)!r} does not say which token ends a document (none of {', '.join(USUAL_ENDS)} is in it)",
        "set data.end_token to the token that ends a document",
    )


def _configured_end(path: Path) -> str | None:
    """``eos_token`` of a tokenizer_config.json, which is a text or an object with the text in ``content``."""
    if not path.is_file():
        return None
    try:
        settings = parse_json(_read(path, LARGEST_JSON))
    except ValueError as error:
        raise BadInput(f"{str(path)!r} cannot be read as JSON: {error}", "repair or remove it") from None
    end = settings.get("eos_token") if isinstance(settings, dict) else None
    if isinstance(end, dict):
        end = end.get("content")
    return end if isinstance(end, str) else None
