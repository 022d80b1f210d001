"""Present a trained network to lm-eval: score continuations, score whole texts, and generate greedily.

In one process. lm-eval asks in text; tokens are the run's own, with nothing prepended.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from shoal.models.generate import generate
from shoal.models.random import key
from shoal.parallel.apply import apply
from shoal.parallel.mesh import Mesh
from shoal.plan.resolve import Job
from shoal.train.data.tokenizers import open_tokenizer
from shoal.train.first_weights import weights_of
from shoal.train.program import blueprint
from shoal.train.write_text import RowScores

ROWS = 8  # texts scored per batch
WRITTEN = 256  # tokens to generate if a task sets no limit

# A pair of texts that identifies it; the context tokens; the tokens to score.
Scored = tuple[tuple[str, str], list[int], list[int]]


class _Stopped(Exception):
    """A stop string has been generated."""


class HarnessModel(TemplateLM):
    """``origin``: a run, a checkpoint or a model directory, as the job names it."""

    def __init__(self, job: Job, mesh: Mesh, origin: str) -> None:
        super().__init__()
        config = job.config
        weights = weights_of(origin, job.model, config.evaluate.ema)
        self.placed = apply(
            blueprint(job.model, config.recipe), mesh, config.tune, weights, config.recipe.seq
        )
        self.network = self.placed.segments[0].network
        self.mesh = mesh
        self.words = open_tokenizer(config.data.tokenizer, config.data.end_token)
        self.longest = job.model.max_positions
        self.scores: RowScores | None = None  # has a cache; created for the first generated text

    @property
    def eot_token_id(self) -> int:
        return self.words.end

    @property
    def tokenizer_name(self) -> str:
        return self.words.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others: Any) -> list[int]:
        return [int(token) for token in self.words.encode_batch([string])[0]]

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: list[Scored], **others: Any) -> list[tuple[float, bool]]:
        found: dict[int, tuple[float, bool]] = {}
        # Batch texts of similar length, so that little is padding.
        order = sorted(range(len(requests)), key=lambda at: -len(requests[at][1]) - len(requests[at][2]))
        for start in range(0, len(order), ROWS):
            some = order[start : start + ROWS]
            rows = [([*requests[at][1], *requests[at][2]])[-self.longest - 1 :] for at in some]
            counts = [min(len(requests[at][2]), len(row) - 1) for at, row in zip(some, rows, strict=True)]
            for at, score in zip(some, self._score(rows, counts), strict=True):
                found[at] = score
        return [found[at] for at in range(len(requests))]

    def _score(self, rows: list[list[int]], counts: list[int]) -> list[tuple[float, bool]]:
        """For the last tokens of each row: the sum of their log-probabilities, and whether each is the most likely
        one.
        """
        if self.scores is not None and self.scores.cache is not None:
            self.scores.cache.start = 0
        longest = max(map(len, rows)) - 1
        # Padding comes after every scored token, so none of them attends to it.
        padded = [row[:-1] + [self.words.end] * (longest - len(row) + 1) for row in rows]
        tokens = torch.tensor(padded, device=self.mesh.device)
        positions = torch.arange(longest, device=tokens.device).expand_as(tokens)
        hidden: Tensor = self.network(tokens, positions, None, None)
        found = []
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            here = slice(len(row) - 1 - count, len(row) - 1)
            scores = self.network.lm_head.logits(hidden[place, here]).double().log_softmax(-1)
            wanted = torch.tensor(row[len(row) - count :], device=tokens.device, dtype=torch.int64)
            greedy = bool((scores.argmax(-1) == wanted).all())
            found.append((float(scores.gather(-1, wanted[:, None]).sum()), greedy))
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of a whole text, cut if it exceeds the network's length; each token is scored once."""
        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.eot_token_id, self.longest, 1)
            pairs = [(("", text), *make_disjoint_window(window)) for window in windows]
            found.append(sum(score for score, _ in self._loglikelihood_tokens(pairs)))
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._write(*request.args) for request in requests]

    def _write(self, context: str, asked: dict[str, Any]) -> str:
        stops = asked.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        count = min(int(asked.get("max_gen_toks", WRITTEN)), self.longest - 1)
        prompt = (self.tok_encode(context) or [self.words.end])[-(self.longest - count) :]
        if self.scores is None:
            self.scores = RowScores(self.placed, self.mesh, self.longest)
        if self.scores.cache is not None:
            self.scores.cache.start = 0
        text = ""

        def told(tokens: Tensor) -> None:
            nonlocal text
            written: list[int] = tokens[0, len(prompt) :].tolist()
            ended = written[-1] == self.words.end
            text = self.words.decode(written[:-1] if ended else written)
            if ended or any(stop and stop in text for stop in stops):
                raise _Stopped

        temperature = float(asked.get("temperature") or 0.0) if asked.get("do_sample") else 0.0
        try:
            first = torch.tensor([prompt], device=self.mesh.device)
            generate(self.scores, first, count, temperature, key(0, 0, "lm-eval"), told=told)
        except _Stopped:
            pass
        for stop in stops:
            text = text.partition(stop)[0] if stop else text
        return text
