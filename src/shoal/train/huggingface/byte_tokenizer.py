"""Shoal's byte tokenizer as a ``tokenizer.json`` that ``transformers`` reads: the same ids for every text.

It is a byte-level BPE without merges, whose vocabulary is the 256 bytes under GPT-2's letters for them.
"""

from __future__ import annotations

import json

END = "<|endoftext|>"
BYTES = 256


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte: itself if it is printable, else the next one from 256 on."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in plain else next(spare)) for byte in range(BYTES)]


def tokenizer_json() -> str:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {
        "id": BYTES,
        "content": END,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    content: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(byte_letters())} | {END: BYTES},
            "merges": [],
        },
    }
    return json.dumps(content, ensure_ascii=False) + "\n"


def tokenizer_config(positions: int) -> str:
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": positions,
    }
    return json.dumps(content, indent=2) + "\n"
