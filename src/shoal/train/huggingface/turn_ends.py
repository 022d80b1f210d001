"""The token that ends an answer, where a run's template says it: often not that of a base model."""

from __future__ import annotations

from pathlib import Path

from shoal.facts.problem import BadInput
from shoal.train.data.conversations import ANSWERS
from shoal.train.data.templates import Unrendered, find_template
from shoal.train.data.tokenizers import FileTokenizer, Tokenizer

TALK = [{"role": "user", "content": "why"}, {"role": ANSWERS, "content": "so"}]


def turn_ends(template: Path | None, tokenizer: Tokenizer, end_token: str | None) -> tuple[int, ...]:
    """A model that learned to write this token has to stop at it. ``template``: None, the tokenizer's own."""
    if not isinstance(tokenizer, FileTokenizer):
        return ()
    try:
        found = find_template(
            "auto" if template is None else str(template), tokenizer.path.parent, end_token
        ).render(TALK)
    except (BadInput, Unrendered):
        return ()  # there is none, or it wants more of a conversation than this one has
    ends = [tokenizer.end_in(found.text[start:stop]) for start, stop in found.answers]
    return tuple(one for one in ends if one is not None)
