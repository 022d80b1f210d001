"""Pipeline parallelism of a module that Shoal did not build: each rank runs the module's own forward pass.

Masks, rotary angles and everything else computed around the blocks are computed on every rank that needs them. Modules
of earlier stages return zeros of the right shape, except the last block before this rank's own, which returns the
hidden states that arrived. The pass ends where the first block of the next stage is called. The schedule is the
engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from shoal.facts.layout.stages import Stage
from shoal.facts.problem import BadInput
from shoal.parallel.mesh import Mesh
from shoal.parallel.module_stages import StagePlan, drop_values, is_within, tensor_owners
from shoal.parallel.schedule_executor import ScheduleExecutor
from shoal.parallel.shards import Reducer
from shoal.parallel.stage_module import with_gradient

WRONG_PLAN = "a plan that names them as they run, see docs/library.md; or pp=1"


class StageEnd(BaseException):
    """Raised to end a stage's pass. Not an ``Exception``, which a model or a loss may catch."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(frozen=True)
class ModuleBatch:
    """Rows that go through the module together; ``number`` counts the micro-batches of all data ranks."""

    rows: Any
    number: int
    loss: Callable[[nn.Module, Any], tuple[Tensor, int]]  # returns a sum and its number of targets


@dataclass
class _Pass:
    inputs: Tensor
    probing: bool  # only asked for the shape of the blocks' input
    entered: bool = False
    came: Tensor | None = None  # hidden states for this stage's blocks
    given: Tensor | None = None  # the output of the last block that ran


class ModuleStage(nn.Module):
    """A rank's part of a module: the blocks of its stage, plus what comes before the first or after the last block."""

    def __init__(
        self,
        module: nn.Module,
        plan: StagePlan,
        stage: Stage,
        absent: list[str],
        device: torch.device,
        draw: Callable[[str], None],
    ) -> None:
        """``draw`` seeds torch's generators."""
        super().__init__()
        self.module, self.plan, self.stage, self.absent = module, plan, stage, absent
        self.device, self.draw = device, draw
        self.divisor = 1.0  # divides losses before their backward pass
        self.totals: list[Tensor] = []  # this step's losses, if computed here
        self.counts: list[int] = []
        self.names = _names(module)
        self.shared = _shared(module, plan)
        self._pass: _Pass | None = None
        self._known: dict[Hashable, Any] = {}

    def holds(self, name: str) -> bool:
        """Whether a name belongs to one stage only."""
        return is_within(name, [*self.plan.first, *self.plan.blocks, *self.plan.last])

    def let_go(self) -> None:
        """Keep only the shapes of modules in other stages."""
        for owners in tensor_owners(self.module).values():
            for path, owner, name in owners:
                if is_within(path, self.absent):
                    drop_values(owner, name)

    def take_part(self) -> None:
        """Hook into the module. Call this after everything else that changes modules."""
        blocks = [self.module.get_submodule(path) for path in self.plan.blocks]
        own = self.stage.layers
        for path in self.absent:
            child = self.module.get_submodule(path)
            earlier = path in self.plan.first or child in blocks[: own.start]
            if earlier:
                gives = child is blocks[own.start - 1]
                child.forward = self._stand_in(path, child, gives, child in blocks)
            elif child in blocks[own.stop : own.stop + 1]:
                child.forward = self._leave
            else:
                child.forward = self._unreachable(path)
        for block in blocks[own.start : own.stop]:
            # Before FSDP's pre-hooks, because a pass may end here; after its forward hooks, because they may replace
            # the output.
            block.register_forward_pre_hook(self._arrive, prepend=True, with_kwargs=True)
            block.register_forward_hook(self._note_given)

    def forward(
        self, inputs: Tensor, batch: ModuleBatch, place: int | None = None, probing: bool = False
    ) -> Tensor:
        """See ``Segment``. ``probing``: return zeros of the shape of the blocks' input."""
        self.draw(f"micro-batch {batch.number} stage {self.stage.index}")
        here = self._pass = _Pass(inputs, probing)
        try:
            total, count = batch.loss(self.module, batch.rows)
        except StageEnd as end:
            hidden = end.hidden
        else:
            if not self.stage.last or not (here.entered or self.stage.first):
                raise BadInput("plan: the loss is computed without all blocks", WRONG_PLAN)
            self.totals.append(total.detach().double())
            self.counts.append(count)
            return (total / self.divisor)[None]
        finally:
            self._pass = None
        if probing:
            return hidden
        came = here.inputs if here.came is None else here.came
        if came.shape != hidden.shape or came.dtype != hidden.dtype:
            raise BadInput(
                f"blocks of a pipeline give what they are given: {_kind(hidden)} came of {_kind(came)}",
                "pp=1",
            )
        return with_gradient(hidden)

    def _passing(self) -> _Pass:
        if self._pass is None:
            raise BadInput(
                "the model was called outside of the run, and this rank has one stage of it",
                "run.step(model, batch, loss=fn) or run.evaluate(model, batch, loss=fn), where fn calls the model",
            )
        return self._pass

    def _stand_in(self, path: str, child: nn.Module, gives: bool, is_block: bool) -> Callable[..., Any]:
        forward = child.forward
        name: Hashable = type(child).__qualname__ if is_block else path

        def run(*arguments: Any, **named: Any) -> Any:
            here = self._passing()
            if here.entered:
                raise BadInput(
                    f"{path} is used again behind the blocks, or the model is called twice for a loss",
                    WRONG_PLAN,
                )
            if is_block:
                self._check_chain(here, _hidden_of(arguments, named))
            leaves, form = _pytree.tree_flatten(self._shapes(name, path, forward, arguments, named))
            made = [
                torch.zeros_like(one, device=self.device) if isinstance(one, Tensor) else one
                for one in leaves
            ]
            if is_block:
                number = next(number for number, one in enumerate(made) if isinstance(one, Tensor))
                if gives and here.probing:
                    raise StageEnd(made[number])
                if gives:
                    made[number], here.entered = here.inputs, True
                here.given = made[number]
            return _pytree.tree_unflatten(made, form)

        return run

    def _shapes(
        self, name: Hashable, path: str, forward: Callable[..., Any], arguments: Any, named: Any
    ) -> Any:
        """The outputs a module would give, as tensors without values."""
        key = (name, kind_of((arguments, named)), self.training)
        if key not in self._known:
            given = _pytree.tree_map_only(Tensor, lambda one: one.detach().to("meta"), (arguments, named))
            with torch.no_grad():
                try:
                    self._known[key] = forward(*given[0], **given[1])
                except (RuntimeError, NotImplementedError, TypeError) as error:
                    raise BadInput(f"{path} does not run on shapes alone: {error}", "pp=1") from error
        return self._known[key]

    def _arrive(self, block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        here = self._pass
        if here is None:
            return
        hidden = _hidden_of(arguments, named)
        self._check_chain(here, hidden)
        if here.came is None:
            here.came = hidden
        if here.probing and self.stage.first:
            raise StageEnd(torch.zeros_like(hidden, requires_grad=False))

    def _note_given(self, block: nn.Module, arguments: Any, outputs: Any) -> None:
        if self._pass is not None:
            leaves = _pytree.tree_leaves(outputs)
            self._pass.given = next(one for one in leaves if isinstance(one, Tensor))

    def _check_chain(self, here: _Pass, hidden: Tensor) -> None:
        """Refuse blocks that are not a plain chain: a residual around a block, for one, would add zeros at a stage's
        first block.
        """
        if here.given is not None and hidden is not here.given:
            raise BadInput(
                "plan: a block is not given what the block before it gave: the model computes something in between",
                "blocks that hold all of it, such as the residual around them; or pp=1",
            )

    def _leave(self, *arguments: Any, **named: Any) -> Any:
        here = self._passing()
        if here.given is None:
            raise BadInput("plan: blocks run in another order than they are named in", WRONG_PLAN)
        self._check_chain(here, _hidden_of(arguments, named))
        raise StageEnd(here.given)

    def _unreachable(self, path: str) -> Callable[..., Any]:
        def refuse(*arguments: Any, **named: Any) -> Any:
            self._passing()
            raise BadInput(f"plan: {path} runs before blocks that it is named behind", WRONG_PLAN)

        return refuse


class ModuleExecutor(ScheduleExecutor):
    """Runs the schedule's instructions on one stage of a module."""

    def __init__(self, stage: ModuleStage, mesh: Mesh, gradients: Reducer) -> None:
        super().__init__([stage], mesh, gradients)
        self.stage = stage
        self._boundaries: dict[Hashable, tuple[tuple[int, ...], torch.dtype]] = {}

    def step(self, batches: Sequence[ModuleBatch], divisor: float) -> None:
        """Compute the gradients of a step's losses, divided by ``divisor``."""
        self.stage.divisor = divisor
        self.load_kernels(batches[0])
        self._begin()
        self.both_passes(batches)

    def evaluate(self, batches: Sequence[ModuleBatch]) -> None:
        """Compute losses only."""
        self.stage.divisor = 1.0
        with torch.no_grad():
            self.load_kernels(batches[0])
            self._begin()
            self.forward_passes(batches)

    def _begin(self) -> None:
        self.stage.totals, self.stage.counts = [], []

    def kind(self, batch: ModuleBatch) -> Hashable:
        device = self.mesh.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return kind_of(batch.rows), cast

    def entry(self, batch: ModuleBatch) -> Tensor:
        return torch.empty(0, device=self.mesh.device)

    def boundary(self, stage: int, batch: ModuleBatch) -> tuple[tuple[int, ...], torch.dtype]:
        kind = self.kind(batch)
        if kind not in self._boundaries:
            with torch.no_grad():
                hidden = self.stage(self.entry(batch), batch, probing=True)
            self._boundaries[kind] = tuple(hidden.shape), hidden.dtype
        return self._boundaries[kind]


def _hidden_of(arguments: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """The hidden states among a block's arguments: its predecessor's output."""
    given = (*arguments, *named.values())
    hidden = named.get("hidden_states", given[0] if given else None)
    if not isinstance(hidden, Tensor):
        raise BadInput(
            "plan: a block of a pipeline takes hidden states first, and then whatever else", "pp=1"
        )
    return hidden


def kind_of(tree: Any) -> Hashable:
    """The shapes and dtypes of all tensors in a tree."""
    return tuple(
        (tuple(one.shape), one.dtype) for one in _pytree.tree_leaves(tree) if isinstance(one, Tensor)
    )


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"


def _names(module: nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer to its name in checkpoints."""
    found: dict[str, str] = {}
    for owners in tensor_owners(module).values():
        named = [f"{path}.{name}" if path else name for path, _, name in owners]
        found.update(dict.fromkeys(named, named[0]))
    return found


def _shared(module: nn.Module, plan: StagePlan) -> set[str]:
    """Names of parameters that the first and the last stage share."""
    found = set()
    for owners in tensor_owners(module).values():
        paths = [path for path, _, _ in owners]
        if any(is_within(one, plan.first) for one in paths) and any(
            is_within(one, plan.last) for one in paths
        ):
            path, _, name = owners[0]
            found.add(f"{path}.{name}" if path else name)
    return found
