"""A run of the user's own loop: ``prepare`` places a model, ``step`` or ``backward`` and ``update`` train it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.layout.offload import waiting
from shoal.facts.model.tensor_split import TensorPart
from shoal.facts.problem import BadInput, first_line
from shoal.models.random import key
from shoal.parallel.mesh import Mesh
from shoal.parallel.module_blocks import Wrap, find_blocks
from shoal.parallel.module_pipeline import ModuleBatch, ModuleStage
from shoal.parallel.module_stages import absent_modules, is_within, stage_of, stage_plan
from shoal.parallel.module_tensor import check_plan, plan_of, split_module
from shoal.parallel.place_module import (
    PlacedModule,
    place_module,
    shapes_of,
    take_in,
    take_in_stage,
    tensors_of,
)
from shoal.parallel.shards import Shard
from shoal.parallel.signed_store import SignedStore
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.checkpoint.storage import DirectoryStorage
from shoal.train.library import given_optimizer
from shoal.train.library.accepted import check_layout, check_scheduler
from shoal.train.library.batches import Share, StepLoader, micro_batches, rows_of, to_device
from shoal.train.library.choose import choose_layout
from shoal.train.library.export_module import check_tokenizer, class_name, export_module
from shoal.train.library.host_states import HostStates
from shoal.train.library.losses import Loss, count_targets, given_loss, own_loss, with_labels
from shoal.train.library.saved_state import ModuleState
from shoal.train.optimizer import CLIP_EPS, squared_norm

ONE_MODEL = "put both into one nn.Module, and prepare that"


@dataclass(frozen=True)
class JoinedRanks:
    """This process among those that were started together."""

    rank: int
    world: int
    device: torch.device
    store: SignedStore | None
    nodes: int
    close: Callable[[], None]


class Run:
    """Made by ``shoal.run``. All ranks must make the same calls in the same order."""

    def __init__(
        self,
        ranks: JoinedRanks,
        layout: Layout | None,
        batch: int | None = None,
        seed: int = 0,
        clip: float | None = None,
        directory: Path | None = None,
        tune: TuneSection | None = None,
    ) -> None:
        """``layout``: None lets the model's size decide."""
        self.rank, self.world, self.device = ranks.rank, ranks.world, ranks.device
        self.seed, self.clip, self.directory, self.tune = seed, clip or 0.0, directory, tune or TuneSection()
        self.done = 0  # steps so far: updates that were made or refused
        self.grad_norm: Tensor | None = None  # of the last step, before clipping
        self.placed: PlacedModule | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: LRScheduler | None = None
        self.state: ModuleState | None = None
        self.updated: dict[Shard, nn.Parameter] = {}  # by pieces, what the optimizer knows
        self.host: HostStates | None = None  # where its states are the host's
        self._ranks, self._batch = ranks, batch
        self._layout, self._mesh = layout, None if layout is None else self._join(layout)
        self._loaders: list[StepLoader] = []
        self._moved: tuple[Any, Any] | None = None  # the last batch, on the device and as it was read
        # What losses are divided by before a backward pass: the last step's number of targets.
        self._scale = 1.0
        self._sums: list[Tensor] = []  # of losses of this step
        self._count = self._passes = 0
        self._cached = False  # whether the model's config says so, outside of training
        self._closed_step = False  # whether the last backward pass of a step has been

    # What this process is.

    @property
    def layout(self) -> Layout:
        return self.mesh.layout

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            raise BadInput('layout="auto" is chosen by the size of the model', "run.prepare(model, …) first")
        return self._mesh

    @property
    def first(self) -> bool:
        """Whether this rank is the one that prints."""
        return self.rank == 0

    def print(self, *words: Any) -> None:
        if self.first:
            print(*words, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the group of ranks."""
        self._ranks.close()

    # Before the loop.

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        data: Any = None,
        scheduler: Any = None,
        *,
        wrap: Wrap = None,
        plan: Mapping[str, str] | None = None,
        shuffle: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        """Place a model, and adapt its optimizer and data to it. Returns what it was given, in the same order.

        ``data``: a ``DataLoader``, whose ``batch_size`` is the step's over all ranks, or a dataset. ``wrap``: the
        model's blocks, where Shoal cannot find them. ``plan``: how tensor ranks split its layers, where the model
        has no ``tp_plan``. ``shuffle``, ``collate``: for a dataset.
        """
        if self.placed is not None:
            raise BadInput("a run has one model, and it is prepared already", ONE_MODEL)
        if not isinstance(model, nn.Module):
            raise BadInput(
                f"{type(model).__name__} is no torch.nn.Module", "run.prepare(model, optimizer, dataset)"
            )
        if self._mesh is None:
            self._mesh = self._join(choose_layout(model, self.world, self.device))
        mesh = self.mesh
        check_layout(mesh.layout)
        ways: dict[str, str] = {}
        if mesh.layout.tp > 1:
            ways = plan_of(model, plan, mesh.layout.tp)
            check_plan(model, ways, mesh.layout.tp)
        stages = stage_plan(model, plan, mesh.layout) if mesh.layout.pp > 1 else None
        blocks = find_blocks(model, wrap)
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        if optimizer is not None:
            given_optimizer.check_optimizer(optimizer, model, mesh.layout.shards > 1)
        check_scheduler(scheduler, optimizer)
        loader = None if data is None else self._loader(data, shuffle, collate)
        config: Any = getattr(model, "config", None)
        self._cached = getattr(config, "use_cache", False) is True
        if self._cached:
            config.use_cache = False  # keys and values of a training step are of no further use
        # Made of the parameters as they are now; FSDP puts others in their place.
        arrived: set[Tensor] = set()
        parts: dict[str, TensorPart] = {}
        summed: set[str] = set()
        shapes, stage = shapes_of(model), None
        trained = [name for name, one in model.named_parameters() if one.requires_grad]
        if stages is not None:
            own = stage_of(model, stages, mesh.layout, mesh.coords["pp"])
            absent = absent_modules(stages, own)
            stage = ModuleStage(model, stages, own, absent, self.device, self._draw)
            take_in_stage(stage, self.device, arrived)
            ways = {path: way for path, way in ways.items() if not is_within(path, absent)}
        if mesh.layout.tp > 1:
            take_in((one for one in tensors_of(model) if not one.is_meta), self.device, arrived)
            parts, summed = split_module(model, ways, mesh)
        self.placed = place_module(
            model, mesh, blocks, shapes, trained, self.tune, parts, arrived, summed, stage
        )
        self.optimizer, self.scheduler = optimizer, scheduler
        self.updated = {piece: piece.tensor for piece in self.placed.pieces}
        if (away := waiting(mesh.layout.offload, "optimizer")) is not None:
            self.host = HostStates(self.placed.pieces, away.fraction, self.device)
            self.updated |= self.host.copies
        if optimizer is not None:
            given_optimizer.take_over(optimizer, names, self.updated)
        self.state = ModuleState(self.placed, optimizer, scheduler, mesh, class_name(model), self.updated)
        if self.directory is not None:
            self.done = self.state.restore(self._place())
            if self.host is not None:
                self.host.follow()
            if self.done:
                self.print(f"shoal: continues after step {self.done} of {self.directory}")
        for each in self._loaders:
            each.done = self.done
        self._draw(f"rank {mesh.data_index}")
        given = [one for one in (model, optimizer, loader, scheduler) if one is not None]
        return given[0] if len(given) == 1 else tuple(given)

    def steps(self, loader: Any, total: int | None = None) -> Iterator[Any]:
        """A batch for each step, on the device: this rank's rows. One epoch; with ``total``, that many steps in
        all."""
        if not isinstance(loader, StepLoader):
            loader = self._loader(loader, False, None)
        while total is None or self.done < total:
            begun, came = self.done, False
            for batch in loader:
                came = True
                moved = to_device(batch, self.device)
                self._moved = (moved, batch)
                yield moved
                if total is not None and self.done >= total:
                    return
            if total is None or (loader.streamed and not came):
                return
            if not loader.streamed and not len(loader):
                raise BadInput("the data has fewer rows than a batch", "more rows, or a smaller batch")
            if came and self.done == begun:
                raise BadInput(
                    "an epoch ended without a step", "run.step(model, batch), or run.update(), in the loop"
                )

    # In the loop.

    def step(self, model: nn.Module, batch: Any, loss: Loss | None = None) -> Tensor:
        """Forward, backward, clip, update; returns the mean loss over all targets of the step, on all ranks.

        ``loss(model, batch)``: your own, which returns a mean over rows, or a sum and its number of targets.
        """
        placed = self._of(model)
        if self._passes:
            raise BadInput("a step that run.backward began is not finished", "run.update() before run.step")
        cut = self._cut(model, batch, loss)
        if placed.executor is not None:
            placed.start_step()
            placed.executor.step([self._staged(*one, loss) for one in cut], self._scale)
            self._passes, self._closed_step = len(cut), True
            self._sums, self._count = placed.executor.stage.totals, sum(placed.executor.stage.counts)
            return self.update()
        for number, part, count in cut:
            self._draw(f"micro-batch {number}")
            total, count = self._loss(placed.module, part, count, loss)
            self.backward(total, count=count, last=number == cut[-1][0])
        return self.update()

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: Any, loss: Loss | None = None) -> float:
        """The mean loss over all targets of a batch, on all ranks; ``loss`` as in ``step``. Nothing is trained.

        Dropout is on while the model is in training mode: call ``model.eval()`` before, ``model.train()`` after.
        """
        placed = self._of(model)
        if self._passes:
            raise BadInput("run.evaluate in the middle of a step", "run.update() first")
        cut = self._cut(model, batch, loss)
        if placed.executor is not None:
            placed.executor.evaluate([self._staged(*one, loss) for one in cut])
            found = list(zip(placed.executor.stage.totals, placed.executor.stage.counts, strict=True))
        else:
            found = [self._loss(placed.module, part, count, loss) for _, part, count in cut]
        placed.after_update()
        mine = [sum(float(total) for total, _ in found), float(sum(count for _, count in found))]
        total, count = self.mesh.hosts.sum_floats(mine if self._has_loss else [0.0, 0.0])
        return total / count if count else math.nan

    def backward(self, loss: Tensor, count: int | Tensor | None = None, *, last: bool = False) -> None:
        """Add the gradients of one micro-batch to those before it.

        ``loss`` is a sum over ``count`` targets; the step divides by the counts of all micro-batches and ranks.
        Without ``count`` it is a mean, and every micro-batch weighs the same. ``last``: no other follows in this
        step, so gradients are sent while the rest is computed.
        """
        placed = self._placed()
        if placed.executor is not None:
            raise BadInput(
                "run.backward: the stages of a pipeline make their passes in an order of their own",
                "run.step(model, batch, loss=fn), where fn(model, batch) calls the model and returns (sum, count)",
            )
        if self._closed_step:
            raise BadInput("run.backward after the one that was said to be the last", "leave out last=True")
        if not self._passes:
            placed.start_step()
        self._passes += 1
        self._count += 1 if count is None else int(count)
        self._sums.append(loss.detach().double())
        self._closed_step = last
        placed.backward(loss / self._scale, last)

    def update(self) -> Tensor:
        """Add up all ranks' gradients, clip, update; returns the step's mean loss."""
        placed = self._placed()
        if self.optimizer is None:
            raise BadInput("there is no optimizer", "run.prepare(model, optimizer, dataset)")
        if not self._passes:
            raise BadInput("no gradients since the last update", "run.backward(loss, count=n) first")
        if not self._closed_step:
            placed.send_rest()
        counted, reached = self._agree(placed)
        placed.finish_step(reached)
        loss, norm = self._measure(placed, counted)
        # Gradients are of losses that were divided by the number of targets of the step before.
        divisor: float | Tensor = counted / self._scale
        if self.clip:
            divisor = divisor * ((norm + CLIP_EPS) / self.clip).clamp(min=1.0)
        if self.host is not None:
            self.host.leave()
        given_optimizer.update(self.optimizer, list(self.updated.values()), divisor, torch.isfinite(norm))
        if self.host is not None:
            self.host.come_back()
        placed.after_update()
        self.grad_norm, self._scale = norm, float(counted)
        self.done += 1
        self._sums, self._count, self._passes, self._closed_step = [], 0, 0, False
        self._draw(f"rank {self.mesh.data_index}")
        return loss

    def save(self, dir: str | Path | None = None) -> Path:
        """Commit the state after the last step: every rank writes its share. Any layout continues from it.

        ``dir``: a run directory other than the run's own.
        """
        if self.state is None:
            raise BadInput("there is no model to save", "run.prepare(model, optimizer, dataset) first")
        if self._passes:
            raise BadInput("run.save in the middle of a step", "run.update() first")
        if dir is None and self.directory is None:
            self.directory = Path(self.mesh.hosts.broadcast(str(_unused(Path("runs")))))
        place = self._place(dir)
        rows = self._loaders[0].share.batch if self._loaders else 0
        self.state.save(place, self.done, self.done * rows)
        return place.at(self.done)

    def export(self, dir: str | Path, *, tokenizer: Any = None, dtype: torch.dtype | None = None) -> Path:
        """Write a directory that ``transformers`` loads; for a plain module, its weights as safetensors.

        For a PEFT model, its adapters. Reads the commit of the last step, and makes it if there is none.
        ``tokenizer``: saved beside the model. ``dtype``: of the weights, None to keep their own.
        """
        check_tokenizer(tokenizer)
        module, into = self._placed().module, Path(dir)
        if (
            self.directory is None
            or self._told(lambda: str(self.done not in self._place().committed())) == "True"
        ):
            self.save()
        place = self._place()

        def write() -> str:
            try:
                export_module(Checkpoint(place, self.done), module, into, tokenizer, dtype, self._cached)
            except BadInput as error:
                return json.dumps([error.problems[0].what, error.problems[0].fix])
            except Exception as error:  # of whatever saves itself: other ranks wait to hear of it
                return json.dumps([f"the export to {into} failed: {first_line(error)}", "see what it says"])
            return ""

        if problem := self._told(write):
            raise BadInput(*json.loads(problem))
        return into

    def mean(self, total: float | Tensor, count: float | Tensor = 1) -> float:
        """Average a measurement over all data ranks: the sum of all totals over the sum of all counts."""
        mine = [float(total), float(count)] if self.mesh.first_of_replica else [0.0, 0.0]
        totals, counts = self.mesh.hosts.sum_floats(mine)
        return totals / counts if counts else math.nan

    def _agree(self, placed: PlacedModule) -> tuple[int, list[int]]:
        """The step's number of targets on all ranks, and on how many of these each parameter has a gradient."""
        mesh, (reached, missing) = self.mesh, placed.reached()
        mine = self._count if self._has_loss else 0
        counted, passes, missed = mesh.hosts.sum_integers([mine, self._passes, missing])
        if passes != self._passes * mesh.world:
            raise BadInput(
                f"ranks differ in their micro-batches: {self._passes} here, {passes} on {mesh.world} ranks",
                "as many rows on every rank: run.prepare(…, dataset) shares them out",
            )
        return max(1, counted), mesh.hosts.sum_integers(reached) if missed else [1] * len(reached)

    def _measure(self, placed: PlacedModule, counted: int) -> tuple[Tensor, Tensor]:
        """The step's mean loss and the norm of its gradients, on the device."""
        mesh = self.mesh
        with torch.no_grad():
            have = [piece for piece in placed.pieces if piece.tensor.grad is not None]
            squares = squared_norm([piece for piece in have if piece.counted], self.device)
            # Of equal gradients one counts, but each has to be finite.
            others = squared_norm([piece for piece in have if not piece.counted], self.device)
            squares = torch.where(torch.isfinite(others), squares, math.nan)
            mine = torch.stack(self._sums).sum() if self._has_loss else torch.zeros_like(squares)
            both = torch.stack([mine.to(self.device), squares])
            if mesh.everyone is not None:
                dist.all_reduce(both, group=mesh.everyone)
            return both[0] / counted, both[1].sqrt() * (self._scale / counted)

    # Within.

    @property
    def _has_loss(self) -> bool:
        """Whether this is the rank of its replica that adds up losses: a pipeline's end has them."""
        if self.placed is None or self.placed.executor is None:
            return self.mesh.first_of_replica
        return self.placed.executor.stage.stage.last and self.mesh.coords["tp"] == 0

    def _cut(self, model: nn.Module, batch: Any, loss: Loss | None) -> list[tuple[int, Any, int]]:
        """A batch as micro-batches: number among those of all ranks, rows, targets of the model's own loss."""
        read = self._moved[1] if self._moved is not None and self._moved[0] is batch else batch
        micro = self.layout.micro
        if self.layout.pp > 1:
            micro = self.layout.micro_batch(rows_of(batch) * self.layout.data_ranks)
        parts = micro_batches(to_device(with_labels(model, batch), self.device), micro)
        # Counted where they were read: to ask the device would be to wait for it.
        counted = micro_batches(with_labels(model, read), micro) if loss is None else parts
        first = self.mesh.data_index * len(parts)
        counts = [count_targets(model, one) if loss is None else 0 for one in counted]
        return [(first + n, part, count) for n, (part, count) in enumerate(zip(parts, counts, strict=True))]

    def _loss(self, module: nn.Module, part: Any, count: int, loss: Loss | None) -> tuple[Tensor, int]:
        if loss is None:
            return own_loss(module, part, count), count
        return given_loss(loss, module, part)

    def _staged(self, number: int, part: Any, count: int, loss: Loss | None) -> ModuleBatch:
        return ModuleBatch(part, number, lambda module, rows: self._loss(module, rows, count, loss))

    def _join(self, layout: Layout) -> Mesh:
        ranks = self._ranks
        return Mesh(layout, ranks.rank, ranks.device, ranks.store, nodes=ranks.nodes)

    def _told(self, work: Callable[[], str]) -> str:
        """What ``work`` says on the first rank, which alone does it."""
        return self.mesh.hosts.broadcast(work() if self.first else "")

    def _place(self, dir: str | Path | None = None) -> DirectoryStorage:
        directory = self.directory if dir is None else Path(dir)
        assert directory is not None
        return DirectoryStorage(directory / "checkpoints")

    def _placed(self) -> PlacedModule:
        if self.placed is None:
            raise BadInput("there is no model", "run.prepare(model, optimizer, dataset) before the loop")
        return self.placed

    def _of(self, model: nn.Module) -> PlacedModule:
        placed = self._placed()
        if model is not placed.module:
            raise BadInput(
                "run.step was given another model than run.prepare", "the model that run.prepare returned"
            )
        return placed

    def _loader(self, data: Any, shuffle: bool, collate: Callable[[list[Any]], Any] | None) -> StepLoader:
        layout = self.layout
        given = data.batch_size if isinstance(data, DataLoader) else None
        batch = self._batch or given or layout.data_ranks * (layout.micro or 1)
        share = layout.data_ranks * (layout.micro or 1)
        if batch % share:
            raise BadInput(
                f"a batch of {batch} rows does not divide by dp·fsdp·micro = {layout.data_ranks}·{layout.micro or 1}",
                f"batch_size={max(1, batch // share) * share}, or another layout",
            )
        shared = Share(self.mesh.data_index, layout.data_ranks, batch, self.seed)
        if isinstance(data, DataLoader):
            loader = StepLoader.of(data, shared)
        else:
            loader = StepLoader(data, shared, shuffle, collate)
        if loader.dropped and self.first:
            print(
                f"shoal: the last {loader.dropped} rows of an epoch are left out: too few for all ranks",
                flush=True,
            )
        loader.done = self.done
        self._loaders.append(loader)
        return loader

    def _draw(self, place: str) -> None:
        """Dropout draws from torch's generators: seeded by step and place, a resume draws what it would have drawn."""
        torch.manual_seed(key(self.seed, self.done + 1, place) & (2**63 - 1))


def _unused(parent: Path) -> Path:
    """A run directory that is not there yet."""
    number = 1
    while (found := parent / f"run-{number}").exists():
        number += 1
    return found
