"""``shoal generate``: text from a run's weights."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number


def generate(
    weights: str,
    prompt: str,
    /,
    *,
    chat: Annotated[bool, Parameter(negative=())] = False,
    system: str | None = None,
    tokens: Annotated[int, Parameter(validator=Number(gte=1, lte=10**6))] = 200,
    temperature: Annotated[float, Parameter(validator=Number(gte=0, lte=1e6))] = 0.8,
    top_p: Annotated[float, Parameter(validator=Number(gt=0, lte=1))] = 1.0,
    top_k: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    seed: Annotated[int, Parameter(validator=Number(gte=0, lt=2**63))] = 0,
    layout: str = "dp=1",
    precision: Literal["fp32", "bf16", "fp16", "fp64"] | None = None,
    tokenizer: str | None = None,
    ema: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Continue a prompt with a run's weights, or answer it.

    Example: shoal generate runs/tiny "def main(" --tokens 100 --temperature 0.5

    Runs in one process and prints tokens as they come; --layout, such as tp=2, spreads a model that no device can
    hold. Keys and values are cached. The same seed gives the same text.

    Parameters
    ----------
    weights
        A run's directory (its newest sound checkpoint), a checkpoint, a Hugging Face model directory or Hub name.
    prompt
        The text to continue; - reads it from standard input.
    chat
        Treat the prompt as a message and answer it, with the tokenizer's chat template.
    system
        With --chat, a system message before it.
    tokens
        Maximum number of tokens to write.
    temperature
        Sampling temperature; 0 always takes the likeliest token.
    top_p
        Sample from the likeliest tokens that together have this probability.
    top_k
        Sample from this many of the likeliest tokens; 0: from all.
    seed
        Seed for sampling.
    layout
        The parallel layout, as in tp=2.
    precision
        Compute precision; by default bf16 on a GPU, fp32 on a CPU.
    tokenizer
        A tokenizer.json, or bytes; by default the run's own, or that of the model directory.
    ema
        Use the average of the weights that recipe.ema keeps.
    json
        Print one JSON document.
    """
    from dataclasses import replace

    from shoal.cli.show import print_json
    from shoal.facts.problem import BadInput
    from shoal.launch import generate as launcher

    if system is not None and not chat:
        raise BadInput("--system without --chat", "--chat, which has messages")
    source = launcher.find_source(weights)
    if tokenizer is not None:
        source = replace(source, origin=replace(source.origin, tokenizer=str(Path(tokenizer).expanduser())))
    text = sys.stdin.read() if prompt == "-" else prompt
    if chat:
        said = [{"role": "system", "content": system}] if system is not None else []
        text = launcher.chat_prompt(source.origin, [*said, {"role": "user", "content": text}])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    job = launcher.job_for(source, layout, precision, tokens, visible, ema)
    reader = launcher.tokenizer_of(source, job)
    ids = launcher.prompt_tokens(source, reader, text, chat) or [reader.end]
    room = job.model.max_positions - len(ids)
    if room < 1:
        raise BadInput(
            f"the prompt has {len(ids)} tokens, {job.model.name} takes {job.model.max_positions} with what it writes",
            "a shorter prompt",
        )

    from shoal.models.generate import TokenCandidates
    from shoal.train.write_text import TextRequest

    count = min(tokens, room)
    ends = launcher.ends_of(source, reader)
    request = TextRequest(
        source.weights, tuple(ids), count, ends, temperature, TokenCandidates(top_k, top_p), seed, ema
    )
    shown = 0

    def tell(written: list[int]) -> None:
        """Print new text, holding back a character that may be incomplete."""
        nonlocal shown
        whole = reader.decode(written).rstrip("\ufffd")
        sys.stdout.write(whole[shown:])
        sys.stdout.flush()
        shown = max(shown, len(whole))

    if not json and not chat:
        sys.stdout.write(text)
    written = launcher.write(job, request, visible, tell if not json else lambda tokens: None)
    answer = reader.decode(written)
    if json:
        document = {"prompt": text, "text": answer, "tokens": written, "ended": len(written) < count}
        print_json({**document, "layout": str(job.layout), "weights": source.weights})
    else:
        sys.stdout.write(answer[shown:] + "\n")
    if not written:
        ended = "the model ended the text at once: the first token that it drew is one that ends a text"
        print(ended, file=sys.stderr)
    return 0
