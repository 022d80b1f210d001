"""The token that ends an answer, if a run's template defines it: often different from a base model's."""

from __future__ import annotations

from pathlib import Path

from shoal.facts.problem import BadInput
from shoal.train.data.conversations import ANSWERS
from shoal.train.data.templates import Unrendered, find_template
from shoal.train.data.tokenizers import FileTokenizer, Tokenizer

TALK = [{"role": "user", "content": "why"}, {"role": ANSWERS, "content": "so"}]


def turn_ends(template: Path | None, tokenizer: Tokenizer, end_token: str | None) -> tuple[int, ...]:
    """The tokens at which a model trained with this template has to stop. ``template``: None uses the tokenizer's
    own.
    """
    if not isinstance(tokenizer, FileTokenizer):
        return ()
    try:
        found = find_template(
            "auto" if template is None else str(template), tokenizer.path.parent, end_token
        ).render(TALK)
    except (BadInput, Unrendered):
        return ()  # no template, or one that needs more of a conversation than this one has
    ends = [tokenizer.end_in(found.text[start:stop]) for start, stop in found.answers]
    return tuple(one for one in ends if one is not None)
