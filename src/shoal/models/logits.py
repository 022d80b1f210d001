"""The loss's work on a chunk of logits: statistics of every token, and the logits' gradients in place.

On a GPU that holds the whole vocabulary, one kernel does both (``models/loss_kernel.py``). Elsewhere these are two
custom operators, so that observers (a dry run, a memory tracker, the compiler) see their outputs and not their
temporaries. On a GPU each is one compiled pass over the logits, in their own precision. On a CPU rows are processed a
few at a time, so that temporaries stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from shoal.facts.logits import at_once
from shoal.facts.problem import first_line
from shoal.facts.targets import IGNORE
from shoal.models import loss_kernel

# Logits processed at a time without the fused kernel: few enough for a CPU's cache.
IN_CACHE = 2**17


Result = TypeVar("Result")


def gradients_in_one_kernel_(
    logits: Tensor, targets: Tensor, factor: float, z: float, cap: float | None
) -> tuple[Tensor, Tensor] | None:
    """Statistics and gradients at once, if the whole vocabulary is here: every token's ln Σ exp and its target's
    logit.

    None if there is no such kernel; then nothing has changed. ``factor``, ``z``, ``cap``: as below.
    """
    whole = loss_kernel.kernel() if at_once(logits.is_cuda, cap is not None) else None
    if whole is None or logits.dtype == torch.float64 or whole in _NOT_COMPILED:
        return None
    found = _tried(whole, whole, logits, targets, factor, z)
    return None if found is None else found[0]


@torch.library.custom_op("shoal::token_statistics", mutates_args=())
def token_statistics(logits: Tensor, targets: Tensor, first: int, cap: float | None = None) -> Tensor:
    """[3, tokens], in at least fp32, from logits [tokens, rows]: the largest, Σ exp(logit − largest), the target's.

    ``first``: the vocabulary index of the first row. If a target's row is not here, its logit is 0; without any rows
    the largest is −∞. ``cap``: use cap · tanh(logit / cap) instead of every logit.
    """
    found = _no_statistics(logits, targets, first, cap)
    if not logits.shape[1]:
        found.zero_()[0].fill_(-torch.inf)
    elif not (logits.is_cuda and _ran_compiled(_statistics, logits, targets, first, found, cap)):
        _in_cache(partial(_statistics, cap=cap), logits, targets, first, found)
    return found


@token_statistics.register_fake
def _no_statistics(logits: Tensor, targets: Tensor, first: int, cap: float | None = None) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.empty(3, logits.shape[0], dtype=wide, device=logits.device)


@torch.library.custom_op("shoal::logits_to_gradients_", mutates_args=("logits",))
def logits_to_gradients_(
    logits: Tensor,
    targets: Tensor,
    first: int,
    normaliser: Tensor,
    factor: Tensor,
    z: float,
    cap: float | None = None,
) -> None:
    """Replace logits by the gradients of Σ factor · (n − target + z·n²), n = ln Σ exp.

    These are (softmax · (1 + 2·z·n) − one-hot) · factor; with a ``cap``, also · (1 − tanh²(logit / cap)).
    ``normaliser``: ln Σ exp per token. ``factor``: per token; its gradient is zero if its target does not count.
    """
    if not logits.shape[1]:
        return
    if not (logits.is_cuda and _ran_compiled(_gradients, logits, targets, first, normaliser, factor, z, cap)):
        _in_cache(partial(_gradients, z=z, cap=cap), logits, targets, first, normaliser, factor)


@logits_to_gradients_.register_fake
def _nothing(
    logits: Tensor,
    targets: Tensor,
    first: int,
    normaliser: Tensor,
    factor: Tensor,
    z: float,
    cap: float | None = None,
) -> None: ...


def _statistics(logits: Tensor, targets: Tensor, first: int, found: Tensor, cap: float | None) -> None:
    wide = logits.to(found.dtype)
    if cap is not None:
        wide = torch.tanh(wide / cap) * cap
    largest = wide.amax(-1)
    place, here = rows_here(targets, first, logits.shape[1])
    of_target = wide.gather(1, place[:, None])[:, 0]
    found[0] = largest
    found[1] = (wide - largest[:, None]).exp().sum(-1)
    found[2] = torch.where(here, of_target, 0)


def _gradients(
    logits: Tensor,
    targets: Tensor,
    first: int,
    normaliser: Tensor,
    factor: Tensor,
    z: float,
    cap: float | None,
) -> None:
    place, here = rows_here(targets, first, logits.shape[1])
    wide, slope = logits.to(normaliser.dtype), None
    if cap is not None:
        bent = torch.tanh(wide / cap)
        wide, slope = bent * cap, 1 - bent.square()
    softmax = (wide - normaliser[:, None]).exp()
    if z:
        softmax = softmax * (1 + 2 * z * normaliser[:, None])
    # A comparison instead of a scattered sum, so that it fuses into the same pass.
    columns = torch.arange(logits.shape[1], device=logits.device)
    own = (columns == place[:, None]) & here[:, None]
    factor = torch.where(targets == IGNORE, 0, factor)
    gradients = torch.where(own, softmax - 1, softmax) * factor[:, None]
    logits.copy_(gradients if slope is None else gradients * slope)


@cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compile on first use only: the compiler initialises the GPU, which must not happen in a process that forks."""
    return torch.compile(function)


# Functions that this machine cannot compile, because there is no compiler or its GPU is too old.
_NOT_COMPILED: set[Callable[..., object]] = set()


def _ran_compiled(function: Callable[..., None], *arguments: object) -> bool:
    """Whether it ran compiled; on failure nothing has changed, and it will not be tried again."""
    return function not in _NOT_COMPILED and _tried(function, _compiled(function), *arguments) is not None


def _tried(
    function: Callable[..., object], compiled: Callable[..., Result], *arguments: object
) -> tuple[Result] | None:
    """``compiled``: the function after compilation on its first call."""
    try:
        return (compiled(*arguments),)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _NOT_COMPILED.add(function)
        print(f"the loss runs without kernels of its own, which is slower: {first_line(error)}", flush=True)
        return None


def _in_cache(
    work: Callable[..., None], logits: Tensor, targets: Tensor, first: int, *by_token: Tensor
) -> None:
    """Process a few tokens at a time. ``by_token``: tensors whose last dimension is tokens."""
    at_once = max(1, IN_CACHE // logits.shape[1])
    for start in range(0, logits.shape[0], at_once):
        part = slice(start, start + at_once)
        work(logits[part], targets[part], first, *(tensor[..., part] for tensor in by_token))


def rows_here(index: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """For each token, its row on this rank (any if none) and whether there is one. IGNORE is in no rank's rows."""
    place = index - first
    here = (place >= 0) & (place < rows)
    return place.clamp(0, max(0, rows - 1)), here
