"""Assign the modules of a network that Shoal did not build to pipeline stages, by a plan.

A plan names what comes first, the row of blocks, and what comes last; Hugging Face models ship one. The blocks are
distributed over the stages. Of other stages' modules a rank keeps only shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.facts.layout import Layout
from shoal.facts.layout.stages import Stage, cut_costs
from shoal.facts.problem import BadInput
from shoal.parallel.module_blocks import CONTAINERS

FIRST, BLOCKS, LAST = "first", "blocks", "last"
STAGE_WORDS = (FIRST, BLOCKS, LAST)
SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True)
class StagePlan:
    """Module paths; the blocks' in execution order."""

    first: list[str]
    blocks: list[str]
    last: list[str]


def check_schedule(layout: Layout) -> None:
    if layout.schedule not in SCHEDULES:
        raise BadInput(
            f"schedule={layout.schedule} needs a network that Shoal built",
            f"schedule={' or '.join(SCHEDULES)} here; shoal train has it",
        )


def stage_plan(module: nn.Module, given: Mapping[str, str] | None, layout: Layout) -> StagePlan:
    """The user's plan (``given``), else the module's own ``pp_plan``, else that of a Hugging Face model."""
    check_schedule(layout)
    words = {pattern: word for pattern, word in (given or {}).items() if word in STAGE_WORDS}
    own = getattr(module, "pp_plan", None) or {}
    if not words and all(word in STAGE_WORDS for word in own.values()):
        words = own
    words = words or _hugging_face_plan(module)
    if not words:
        raise BadInput(
            f"layout pp={layout.pp}: {type(module).__name__} has no plan for a pipeline",
            f"run.prepare(…, plan={_example(module)}), see docs/library.md; or pp=1",
        )
    found: dict[str, list[str]] = {word: [] for word in STAGE_WORDS}
    for pattern, word in words.items():
        if word not in STAGE_WORDS:
            raise BadInput(
                f"plan: {word!r} of {pattern} is no part of a pipeline", f"one of {', '.join(STAGE_WORDS)}"
            )
        names = named_modules(module, pattern)
        if not names:
            raise BadInput(
                f"plan: the model has no module {pattern!r}", "names as model.named_modules() has them"
            )
        found[word] += _children(module, names) if word == BLOCKS else names
    plan = StagePlan(found[FIRST], found[BLOCKS], found[LAST])
    _check_complete(module, plan)
    if len(plan.blocks) < layout.pp:
        raise BadInput(
            f"layout pp={layout.pp}, and the plan names {len(plan.blocks)} blocks: every stage needs one",
            f"pp={max(1, len(plan.blocks))} or less",
        )
    _check_router_losses(module)
    return plan


def stage_of(module: nn.Module, plan: StagePlan, layout: Layout, place: int) -> Stage:
    """The stage of one rank of the pipeline, cut to minimise the parameters of the largest stage."""
    costs = [_size(module, [path]) for path in plan.blocks]
    # A lookup multiplies nothing; a head multiplies with all of its weights.
    costs[-1] += _size(module, plan.last)
    return cut_costs(costs, layout.pp)[place]


def absent_modules(plan: StagePlan, stage: Stage) -> list[str]:
    """Paths of the modules in other stages."""
    blocks = [path for number, path in enumerate(plan.blocks) if number not in stage.layers]
    return [*([] if stage.first else plan.first), *blocks, *([] if stage.last else plan.last)]


def tensor_owners(module: nn.Module) -> dict[Tensor, list[tuple[str, nn.Module, str]]]:
    """Parameters and buffers, each once in module order, with (path, module, name) of all owners."""
    found: dict[Tensor, list[tuple[str, nn.Module, str]]] = {}
    for path, child in module.named_modules():
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None:
                found.setdefault(tensor, []).append((path, child, name))
    return found


def is_within(path: str, paths: Iterable[str]) -> bool:
    return any(path == one or path.startswith(f"{one}.") for one in paths)


def drop_values(owner: nn.Module, name: str) -> None:
    """Replace a parameter or a buffer by its shape (a meta tensor)."""
    tensor: Tensor = getattr(owner, name)
    shape = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        owner._parameters[name] = nn.Parameter(shape, requires_grad=tensor.requires_grad)
    else:
        owner._buffers[name] = shape


def named_modules(module: nn.Module, pattern: str) -> list[str]:
    """Names of the modules that match; ``*`` stands for one part of a name."""
    expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    return [name for name, _ in module.named_modules() if expression.fullmatch(name)]


def _children(module: nn.Module, names: list[str]) -> list[str]:
    """The blocks' names if ``names`` is a container of blocks."""
    row = module.get_submodule(names[0])
    if len(names) == 1 and isinstance(row, (*CONTAINERS, nn.Sequential)):
        return [f"{names[0]}.{member}" for member, _ in row.named_children()]
    return names


def _hugging_face_plan(module: nn.Module) -> dict[str, str]:
    """The plan of a ``transformers`` model: named parts, one of them the row of blocks, each with its inputs and
    outputs.

    It may belong to a nested model, as with PEFT.
    """
    for path, child in module.named_modules():
        parts: dict[str, Any] = getattr(child, "pp_plan", None) or {}
        modules = dict(child.named_modules())
        # ``named_modules`` lists them in the order they were created, which is the order they run in.
        order = [name for name in modules if name in parts]
        rows = [name for name in order if isinstance(modules[name], CONTAINERS)]
        if len(order) < len(parts) or len(rows) != 1:
            continue
        row = order.index(rows[0])
        words = [FIRST] * row + [BLOCKS] + [LAST] * (len(order) - row - 1)
        return {f"{path}.{name}" if path else name: word for name, word in zip(order, words, strict=True)}
    return {}


def _check_complete(module: nn.Module, plan: StagePlan) -> None:
    every = [*plan.first, *plan.blocks, *plan.last]
    for owners in tensor_owners(module).values():
        for path, child, name in owners:
            if isinstance(getattr(child, name), nn.Parameter) and not is_within(path, every):
                whole = f"{path}.{name}" if path else name
                raise BadInput(
                    f"plan: {whole} is in no stage of the pipeline",
                    f'say of {path or "a module that holds it"} whether it is "first" or "last"',
                )
        places = {_place(path, plan) for path, _, _ in owners if is_within(path, every)}
        if len(places) > 1 and places != {FIRST, LAST}:
            raise BadInput(
                f"plan: {owners[0][0]} and {owners[-1][0]} share a parameter, and are in different stages",
                "parameters that the first and the last modules share, or pp=1",
            )


def _place(path: str, plan: StagePlan) -> str:
    for word, paths in ((FIRST, plan.first), (LAST, plan.last)):
        if is_within(path, paths):
            return word
    return next(one for one in plan.blocks if is_within(path, [one]))


def _check_router_losses(module: Any) -> None:
    """Refuse router losses: transformers sums them at the end, from the outputs of all blocks."""
    if getattr(getattr(module, "config", None), "output_router_logits", False):
        raise BadInput(
            "config.output_router_logits: the routers' loss needs those of all blocks, which a stage does not have",
            "config.output_router_logits = False, or pp=1",
        )


def _size(module: nn.Module, paths: list[str]) -> int:
    found = {one for path in paths for one in module.get_submodule(path).parameters() if one.dim() > 1}
    return 1 + sum(one.numel() for one in found)


def _example(module: nn.Module) -> str:
    """A plan to suggest: the longest row of modules, and what comes before and after it."""
    rows = {
        path: len(child)
        for path, child in module.named_modules()
        if isinstance(child, nn.ModuleList) and child
    }
    if not rows:
        return '{"embed": "first", "layers": "blocks", "head": "last"}'
    row = max(rows, key=lambda path: rows[path])
    words, passed = {}, False
    for path, child in module.named_modules():
        passed = passed or path == row
        if path == row:
            words[path] = BLOCKS
        elif next(child.parameters(recurse=False), None) is not None and not is_within(path, [row]):
            words[path] = LAST if passed else FIRST
    return "{" + ", ".join(f'"{path}": "{word}"' for path, word in words.items()) + "}"
