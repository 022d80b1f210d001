"""Export a user's own module from a checkpoint: its weights as safetensors, plus what `transformers` needs to load it.

A checkpoint has the module's own names, as in its state dict. Works tensor by tensor, so no process holds the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shoal.facts.problem import BadInput
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.huggingface.export import HEADERS, check_free, written_aside
from shoal.train.huggingface.weights_file import (
    FILE_BYTES,
    INDEX,
    TensorEntry,
    cut_into_files,
    index_of,
    write_weights_file,
)


def export_module(
    checkpoint: Checkpoint, module: Any, into: Path, tokenizer: Any, dtype: torch.dtype | None, cached: bool
) -> None:
    """Export on one rank; all or nothing. ``cached``: whether the model used its KV cache before training.

    ``dtype``: of floating-point tensors; None: unchanged. ``tokenizer``: any object with ``save_pretrained``.
    """
    check_free(into)

    def written(name: str) -> torch.dtype:
        held = checkpoint.dtype("weight", name)
        return dtype if dtype is not None and held.is_floating_point else held

    entries = [
        TensorEntry(name, HEADERS[written(name)], shape) for name, shape in checkpoint.manifest.shapes.items()
    ]
    files = cut_into_files(entries, FILE_BYTES)

    def contents(tensors: list[TensorEntry]) -> Iterator[memoryview]:
        for one in tensors:
            values = checkpoint.tensor("weight", one.name).to(written(one.name))
            yield values.reshape(-1).view(torch.uint8).numpy().data

    with written_aside(into) as aside:
        if hasattr(module, "peft_config"):
            trained = {name for name, one in module.named_parameters() if one.requires_grad}
            buffers = {name for name, _ in module.named_buffers()}
            kept = [one.name for one in entries if one.name in trained | buffers]
            held = {name: checkpoint.tensor("weight", name).to(written(name)) for name in kept}
            # The base model stays where it came from: its names here are PEFT's, which nothing else reads.
            module.save_pretrained(aside, state_dict=held)
            if tokenizer is not None:
                tokenizer.save_pretrained(aside)
            return
        for name, tensors in files.items():
            write_weights_file(aside / name, tensors, contents(tensors))
        if len(files) > 1:
            (aside / INDEX).write_text(index_of(files), encoding="utf-8")
        config: Any = getattr(module, "config", None)
        if hasattr(config, "save_pretrained"):
            told = copy.deepcopy(config)
            told.use_cache = cached
            told.architectures = [class_name(module)]
            told.dtype = next(written(one.name) for one in entries if written(one.name).is_floating_point)
            told.save_pretrained(aside)
        for other in (getattr(module, "generation_config", None), tokenizer):
            if other is not None:
                other.save_pretrained(aside)


def class_name(module: Any) -> str:
    """The module's original class: FSDP replaces it with a subclass."""
    return type(module).__name__.removeprefix("FSDP")


def check_tokenizer(tokenizer: Any) -> None:
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise BadInput(
            f"{type(tokenizer).__name__} cannot be saved beside the model", "tokenizer= one of transformers'"
        )
