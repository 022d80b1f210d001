"""Shapes to measure: those of real models on an accelerator, of small ones on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shoal.facts.logits import tokens_at_once

# (inner, columns) of a linear layer, and the numbers of tokens to measure it with.
Widths = tuple[tuple[int, int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Load:
    """What is measured in turns, at one precision."""

    precision: torch.dtype  # of activations
    states: torch.dtype  # of parameters
    widths: Widths
    attention: tuple[tuple[int, int, int], ...]  # (head size, length, sequences)
    tokens: tuple[int, ...]  # for memory-bound work
    losses: tuple[tuple[int, int], ...]  # (tokens, vocabulary)
    lookups: tuple[tuple[int, int], ...]
    weights: tuple[int, ...]  # elements of a matrix that is cast or added
    updates: tuple[int, ...] = ()  # elements that an optimizer updates


@dataclass(frozen=True)
class CalibrationSizes:
    """The first load is the device's main use."""

    loads: tuple[Load, ...]
    heads: int
    head_dims: tuple[int, ...]  # for rotary embedding
    hidden: int
    inner: int
    side: int  # of a large square matmul
    filler: int  # elements of the work between samples
    copied: int  # bytes to the device and back
    updated: int  # parameters that the host updates


_ROWS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_FEW_ROWS = (1024, 4096, 16384)
_VOCABULARY = 128256
_LOSS = tokens_at_once(_VOCABULARY)

_HALF = Load(
    precision=torch.bfloat16,
    states=torch.float32,
    widths=(
        (768, 768, _FEW_ROWS),
        (768, 3072, _FEW_ROWS),
        (3072, 768, _FEW_ROWS),
        (2048, 512, _ROWS),
        (2048, 2048, _ROWS),
        (2048, 8192, _ROWS),
        (8192, 2048, _ROWS),
        (4096, 1024, _ROWS),
        (4096, 4096, _ROWS),
        (4096, 14336, _ROWS),
        (14336, 4096, _ROWS),
        (8192, 1024, _FEW_ROWS[:2]),
        (8192, 8192, _FEW_ROWS[:2]),
        (8192, 28672, _FEW_ROWS[:2]),
        (28672, 8192, _FEW_ROWS[:2]),
        (768, 50257, (tokens_at_once(50257),)),
        (2048, _VOCABULARY, (512, _LOSS)),
        (4096, _VOCABULARY, (512, _LOSS)),
    ),
    attention=tuple(
        (head_dim, seq, sequences)
        for head_dim in (64, 128)
        for seq, sequences in (
            *((512, 1), (512, 8), (512, 64), (1024, 1), (1024, 16), (2048, 1), (2048, 8)),
            *((4096, 1), (4096, 2), (4096, 8), (8192, 1), (8192, 4), (16384, 1)),
        )
    ),
    tokens=(32, 256, 1024, 4096, 8192, 16384, 32768),
    losses=((64, _VOCABULARY), (256, _VOCABULARY), (_LOSS, _VOCABULARY), (2048, 32000)),
    lookups=((1024, 32000), (4096, 50257), (4096, _VOCABULARY), (32768, _VOCABULARY)),
    weights=(2**16, 2**20, 2**22, 2**24, 2**26, 2**28),
    updates=(2**20, 2**24, 2**27),
)
# A matmul takes ten times as long, and fewer models are trained this way.
_SINGLE = Load(
    precision=torch.float32,
    states=torch.float32,
    widths=(
        *((768, 768, _FEW_ROWS), (768, 3072, _FEW_ROWS), (3072, 768, _FEW_ROWS)),
        *((2048, 512, _FEW_ROWS), (2048, 2048, _FEW_ROWS), (2048, 8192, _FEW_ROWS), (8192, 2048, _FEW_ROWS)),
        *((4096, 1024, (4096,)), (4096, 4096, (4096,)), (4096, 14336, (4096,)), (14336, 4096, (4096,))),
        (2048, _VOCABULARY, (_LOSS,)),
    ),
    attention=(
        *(
            (64, 512, 2),
            (64, 1024, 4),
            (64, 1024, 16),
            (64, 2048, 1),
            (64, 2048, 4),
            (64, 4096, 1),
            (64, 8192, 1),
        ),
        *((128, 1024, 2), (128, 4096, 1)),
    ),
    tokens=(32, 256, 1024, 4096, 16384),
    losses=((64, _VOCABULARY), (_LOSS, _VOCABULARY)),
    lookups=((1024, 32000), (4096, _VOCABULARY)),
    weights=(2**16, 2**22, 2**26),
)
ACCELERATOR = CalibrationSizes(
    loads=(_HALF, _SINGLE),
    heads=32,
    head_dims=(64, 128),
    hidden=2048,
    inner=8192,
    side=8192,
    filler=2**27,
    copied=2**28,
    updated=2**27,
)
_CPU = Load(
    precision=torch.float32,
    states=torch.float32,
    widths=(
        (64, 64, (128, 1024)),
        (128, 128, (128, 1024, 4096)),
        (128, 512, (128, 1024, 4096)),
        (512, 128, (128, 1024, 4096)),
        (512, 512, (128, 1024)),
        (512, 2048, (128, 1024)),
        (2048, 512, (128, 1024)),
        (2048, 2048, (64, 256)),
        (128, 256, (1024, 4096)),
        (256, 32000, (128,)),
    ),
    attention=tuple(
        (head_dim, seq, sequences)
        for head_dim in (32, 64)
        for seq, sequences in ((128, 8), (256, 4), (1024, 1))
    ),
    tokens=(16, 64, 512, 4096),
    losses=((64, 256), (1024, 256), (128, 32000)),
    lookups=((256, 256), (1024, 256), (1024, 32000)),
    weights=(2**10, 2**14, 2**18, 2**22),
    updates=(2**14, 2**18, 2**22),
)
CPU = CalibrationSizes(
    loads=(_CPU,),
    heads=4,
    head_dims=(32,),
    hidden=256,
    inner=768,
    side=512,
    filler=2**16,
    copied=0,
    updated=2**24,
)

# Samples keep their operands and what a backward pass needs: about this much in all, at most.
NEEDED = 48 * 2**30
SPARED_ROWS = 4096


def sizes(device: torch.device, memory: int) -> CalibrationSizes:
    """Sizes for this device: accelerators with little memory skip the largest."""
    if device.type == "cpu":
        return CPU
    if memory >= NEEDED:
        return ACCELERATOR
    return replace(
        ACCELERATOR, filler=2**24, loads=tuple(_fewer(load, SPARED_ROWS) for load in ACCELERATOR.loads)
    )


def _fewer(load: Load, rows: int) -> Load:
    return replace(
        load,
        widths=tuple(
            (inner, columns, kept)
            for inner, columns, tokens in load.widths
            if (kept := tuple(row for row in tokens if row <= rows))
        ),
        attention=tuple(one for one in load.attention if one[1] * one[2] <= rows),
        tokens=tuple(one for one in load.tokens if one <= rows),
        lookups=tuple(one for one in load.lookups if one[0] <= rows),
        weights=tuple(one for one in load.weights if one <= 2**26),
        updates=load.updates[:2],
    )
