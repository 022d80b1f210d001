"""A worker of parameter servers: pulls parameters, computes the gradient of a part of a step, pushes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shoal.facts.layout.server_ranges import elements, step_and_part
from shoal.models.initial import no_weights
from shoal.observe.flight_recorder import COMMIT, EVALUATE, INPUT, STEP, Announce, no_announce
from shoal.parallel import server as wire
from shoal.parallel.apply import apply
from shoal.parallel.mesh import Mesh
from shoal.parallel.server import ServerLink, ranges
from shoal.parallel.shards import gradient
from shoal.plan.resolve import Job
from shoal.train.data.collection import Collection
from shoal.train.data.input import open_loader
from shoal.train.data.tokenizers import open_tokenizer
from shoal.train.evaluate import own_heldout, sample_rows
from shoal.train.files import RowFile
from shoal.train.optimizer import LossScale
from shoal.train.program import BACKEND, blueprint, float8_scaling, reduce_dtype
from shoal.train.run_directory import RunDirectory
from shoal.train.step import Step, added


class ServerWorker:
    """The whole network on one device, and a link to each server."""

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        dataset: Path,
        mesh: Mesh,
        links: Sequence[ServerLink],
        announce: Announce = no_announce,
    ) -> None:
        """``mesh`` has only this worker; ``job`` is that of all workers."""
        config, recipe = job.config, job.config.recipe
        self.job, self.run, self.mesh, self.links, self.announce = job, run, mesh, links, announce
        self.workers = job.layout.world
        self.tokenizer = open_tokenizer(config.data.tokenizer, config.data.end_token)
        self.loader = open_loader(config, Collection.open(dataset), self.tokenizer)
        self.placed = apply(
            blueprint(job.model, recipe),
            mesh,
            config.tune,
            no_weights,
            recipe.seq,
            compile_with=BACKEND if job.compilation.on else None,
            fp8=float8_scaling(recipe),
        )
        self.pieces = self.placed.gradients.pieces
        # Never updates, so it never has states.
        idle = torch.optim.SGD([piece.tensor for piece in self.pieces], lr=0.0)
        self.step = Step(self.placed, idle, recipe, mesh, LossScale())
        held = [piece.held for piece in self.pieces]
        self.shares = [elements(mine) for mine in ranges(held, len(links))]
        self.rest = self.pieces[0].tensor.dtype
        self.reduce = reduce_dtype(recipe) or self.rest

    def run_to_end(self) -> None:
        first = self.links[0]
        while True:
            self.announce(INPUT, 0)
            first.tell(wire.NEXT)
            kind, number, done, *_ = first.hear()
            if kind == wire.END:
                return
            if kind == wire.EVALUATE:
                self._evaluate(int(number), int(done))
            else:
                self._train(int(number))

    def _train(self, item: int) -> None:
        step, part = step_and_part(item, self.workers)
        sync = self.job.config.server.mode == "sync"
        self._pull(item, step - 1 if sync else 0)
        self.announce(STEP, step)
        positions = self.job.layout.positions(self.job.config.recipe.batch, part)
        batches = [self.loader.rows(step, group).to(self.mesh.device) for group in positions]
        targets = sum(batch.count for batch in batches)
        loss, norm, *_ = self.step.compute_gradients(step, batches, targets).tolist()
        self.announce(COMMIT, step)
        flat = torch.cat([gradient(piece).reshape(-1) for piece in self.pieces]).to("cpu", self.reduce)
        shares = flat.split(self.shares)
        # The first server last: when it has a push, all others have it too.
        for server in reversed(range(len(self.links))):
            link = self.links[server]
            link.tell(wire.PUSH, item, targets, loss, norm)
            link.send(shares[server])
            link.hear()

    def _pull(self, item: int, need: int) -> None:
        """Pull in server order: servers admit only so many workers, and two workers must not wait for each other."""
        pulled = []
        for link, share in zip(self.links, self.shares, strict=True):
            link.tell(wire.PULL, item, 0, 0, 0, need)
            pulled.append(link.receive(torch.empty(share, dtype=self.rest)))
        self._become(torch.cat(pulled))

    @torch.no_grad()
    def _become(self, flat: Tensor) -> None:
        values = flat.split([piece.tensor.numel() for piece in self.pieces])
        for piece, value in zip(self.pieces, values, strict=True):
            piece.tensor.copy_(value.view_as(piece.tensor))
        self.placed.after_update()

    def _evaluate(self, part: int, done: int) -> None:
        self._pull(-1, done)
        self.announce(EVALUATE, done)
        evaluate, recipe, layout = self.job.config.evaluate, self.job.config.recipe, self.job.layout
        loss, targets = 0.0, 0
        if self.loader.heldout is not None:
            micro, at_once = layout.micro_batch(recipe.batch), layout.accumulation(recipe.batch)
            most = evaluate.batches * recipe.batch
            tell = partial(self.announce, EVALUATE, done)
            losses, targets = own_heldout(
                self.placed, self.loader.heldout, self.mesh, most, micro, at_once, (part, self.workers), tell
            )
            loss = float(added(losses, self.placed.measures, self.mesh.device)[0])
            if part == 0:
                rows = RowFile(self.run.samples)
                for row in sample_rows(
                    self.placed, self.loader, self.tokenizer, self.mesh, evaluate, recipe.seed, done
                ):
                    rows.append(row)
                rows.flush()
        self.links[0].tell(wire.RESULT, part, targets, loss)
        self.links[0].hear()
