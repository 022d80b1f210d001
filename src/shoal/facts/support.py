"""What the engine supports today; a config that asks for more is rejected before anything is spawned."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from shoal.facts import strategies
from shoal.facts.config import EVERY_PROJECTION, Config, Lora
from shoal.facts.layout import DEGREES, Layout, divisors, printed
from shoal.facts.layout.offload import waiting
from shoal.facts.layout.stages import cut
from shoal.facts.layout.updates import stage_parameters
from shoal.facts.losses import LOSSES
from shoal.facts.model import Model
from shoal.facts.model.parameters import (
    BLOCKS,
    expert_parameters,
    llama_parameters,
    projections,
)
from shoal.facts.nf4 import BLOCK, cut_blocks
from shoal.facts.optimizers import WHOLE
from shoal.facts.problem import BadInput, Problem

# Optimizers whose update of an element needs no other element.
ON_HOST = ("adamw", "sgd")


def check(config: Config, model: Model, layout: Layout) -> None:
    """Raise one ``BadInput`` with everything requested that the engine does not run yet."""
    problems = missing(config, model, layout)
    if problems:
        raise BadInput(problems)


def missing(config: Config, model: Model | None, layout: Layout) -> list[Problem]:
    """Everything requested that the engine does not run yet. ``model`` is None if none was found."""
    found = [*_in_config(config), *_in_layout(layout), *_with_offload(config, layout)]
    found += _in_backward(config, layout) if config.tune.optimizer_in_backward else ()
    found += _with_frozen(config, model, layout) if config.recipe.freezes else ()
    found += _with_blocks(config, layout) if config.recipe.blockwise else ()
    found += _in_model(config, model) if model else ()
    lacking = [Problem(f"{what}: this version of Shoal does not train with it", fix) for what, fix in found]
    lacking += _unmatched_groups(config, model) if model else ()
    if model is not None and config.model.lora is not None:
        lacking += _unmatched_targets(config.model.lora, model)
        if config.model.lora.base == "nf4":
            lacking += _cut_blocks(model, layout)
    return [*lacking, *(_beside_servers(config, model, layout) if config.server.servers else ())]


def refuse_servers(config: Config, command: str) -> None:
    """For commands whose ranks are those of a layout: they ignore servers, so they would judge a different run."""
    if config.server.servers:
        raise BadInput(
            f"server.servers = {config.server.servers}: {command} knows ranks of a layout, and no parameter server",
            "--set server.servers=0: the dp run that synchronous servers make",
        )


def _beside_servers(config: Config, model: Model | None, layout: Layout) -> Iterator[Problem]:
    """What a parameter server cannot be combined with: workers are independent replicas."""
    others = [axis for axis in DEGREES if axis != "dp" and getattr(layout, axis) > 1]
    if others:
        batch = config.recipe.batch
        nearest = Layout(dp=max(one for one in divisors(batch) if one <= layout.world))
        yield Problem(
            f"server.servers = {config.server.servers} with {', '.join(others)}: workers of a parameter server hold "
            "whole models, so dp is its only axis",
            f"nearest legal layout: {nearest}; or server.servers = 0",
            "layout",
        )
    if model is not None and model.experts is not None:
        # Routers' losses and corrections need a whole step, which no worker sees.
        yield Problem(
            f"server.servers with the experts of {model.name}",
            "server.servers = 0, or a model without experts",
        )
    if config.recipe.batch_ramp:
        yield Problem("server.servers with recipe.batch_ramp", "leave it out, or server.servers = 0")
    if config.evaluate.sources or config.evaluate.patience:
        yield Problem(
            "server.servers with evaluate.source or evaluate.patience: workers evaluate on what is held out",
            "leave them out, or server.servers = 0",
        )
    if config.run.strict:
        yield Problem("server.servers with run.strict", "run.strict = false, or server.servers = 0")
    if config.recipe.optimizer in WHOLE:
        yield Problem(
            f'server.servers with recipe.optimizer = "{config.recipe.optimizer}": a server has a range of elements, '
            "and no whole matrix",
            'recipe.optimizer = "adamw", "sgd" or "lion"; or server.servers = 0',
        )
    if config.recipe.loss_facts.reference:
        yield Problem(
            f'server.servers with recipe.loss = "{config.recipe.loss}": workers know no first weights to compare with',
            "server.servers = 0",
        )
    if config.recipe.ema:
        yield Problem("server.servers with recipe.ema", "recipe.ema = 0, or server.servers = 0")
    if config.recipe.precision == "fp16":
        yield Problem(
            'server.servers with recipe.precision = "fp16": one loss scale for all is not known to workers',
            'recipe.precision = "bf16" or "fp32"',
        )


def runs(layout: Layout) -> bool:
    """Whether the engine runs all of a layout."""
    return not any(_in_layout(layout))


def _in_layout(layout: Layout) -> Iterator[tuple[str, str]]:
    *others, last = (axis for axis in DEGREES if strategies.OWNERS[axis].runs)
    run = f"; {', '.join(others)} and {last} are run"
    for one in strategies.missing(layout):
        value = printed(getattr(layout, one.key))
        yield f"layout: {one.key}={value}", f"{one.key}={one.off}{run if one.key in DEGREES else ''}"
    if layout.recompute == "none" and any(part.what == "activations" for part in layout.offload):
        # All activations would be transferred, several times what the computation can hide.
        what = "layout: offload=activations with recompute=none"
        yield what, "recompute=full, or selective; only what such blocks keep is offloaded"


def _with_offload(config: Config, layout: Layout) -> Iterator[tuple[str, str]]:
    """What a host update cannot be combined with."""
    if waiting(layout.offload, "optimizer") is None:
        return
    recipe, updated = config.recipe, "layout: offload=optimizer with"
    if recipe.optimizer == "sgd" and recipe.rounds_by_chance:
        what = f'{updated} recipe.optimizer = "sgd" and recipe.states = "{recipe.states}"'
        yield what, 'recipe.rounding = "nearest", or recipe.optimizer = "adamw"'
    if recipe.optimizer not in ON_HOST:
        yield f'{updated} recipe.optimizer = "{recipe.optimizer}"', 'recipe.optimizer = "adamw"'
    if recipe.ema:
        yield f"{updated} recipe.ema", "recipe.ema = 0"
    if recipe.precision == "fp16":
        # Offloaded gradients still carry the loss scale.
        yield f'{updated} recipe.precision = "fp16"', 'recipe.precision = "bf16"'
    if recipe.precision == "fp8" and waiting(layout.offload, "params") is not None:
        # fp8 scales are computed from weights on the device after every update.
        yield 'layout: offload=params with recipe.precision = "fp8"', "offload=optimizer"
    if config.run.strict:
        yield f"{updated} run.strict", "run.strict = false"
    if config.server.servers:
        yield f"{updated} server.servers", "offload=none: the servers have the optimizer's states"


def of_another_loss(config: Config) -> Iterator[Problem]:
    """Rows in a format that the loss does not read. A prepared data set carries its own format."""
    loss, allowed = config.recipe.loss, config.recipe.loss_facts.formats
    for form in dict.fromkeys(part.format for part in config.data.parts):
        if form not in allowed:
            readers = [name for name, facts in LOSSES.items() if form in facts.formats]
            yield Problem(
                f'recipe.loss = "{loss}" with data.format = "{form}"',
                f'data.format = "{allowed[0]}", or recipe.loss = "{readers[0]}"',
                "data.format",
            )


def _in_backward(config: Config, layout: Layout) -> Iterator[tuple[str, str]]:
    """What an update in the backward pass cannot be combined with: anything that needs all gradients before the first
    update, or adds to gradients afterwards."""
    early, recipe = "tune.optimizer_in_backward", config.recipe
    if recipe.clip:
        yield (
            f"{early} with recipe.clip = {recipe.clip:g}, which needs the norm of all gradients",
            "recipe.clip = 0",
        )
    passes = max(layout.accumulation(batch) for batch in (recipe.batch, recipe.batch_unit))
    if passes > 1:
        yield (
            f"{early} with {passes} micro-batches a step, whose gradients add up",
            "leave out micro, or a smaller batch",
        )
    if layout.pp > 1:
        yield f"{early} with layout: pp={layout.pp}, whose micro-batches' gradients add up", "pp=1"
    whole = layout.shards > 1 and layout.zero == 1
    if whole or (layout.dp > 1 and (layout.shards == 1 or layout.zero < 3)):
        what = "zero=1" if whole else f"dp={layout.dp}"
        yield (
            f"{early} with layout: {what}, which keeps all gradients",
            "fsdp with zero=3, or zero=2 without dp",
        )
    if waiting(layout.offload, "optimizer") is not None:
        yield f"{early} with layout: offload=optimizer", "offload=none, or tune.optimizer_in_backward = false"
    if recipe.optimizer in WHOLE:
        yield f'{early} with recipe.optimizer = "{recipe.optimizer}"', 'recipe.optimizer = "adamw"'
    if recipe.precision == "fp16":
        yield (
            f'{early} with recipe.precision = "fp16", whose loss scale may refuse a step',
            'recipe.precision = "bf16"',
        )
    if config.fault.nonfinite != "stop":
        what = f'{early} with fault.nonfinite = "{config.fault.nonfinite}": an update cannot be taken back'
        yield what, 'fault.nonfinite = "stop"'
    if config.fault.on_spike != "warn":
        yield f'{early} with fault.on_spike = "{config.fault.on_spike}"', 'fault.on_spike = "warn"'
    if config.run.strict:
        yield f"{early} with run.strict", "run.strict = false"
    if config.server.servers:
        yield f"{early} with server.servers", "server.servers = 0"


def _with_frozen(config: Config, model: Model | None, layout: Layout) -> Iterator[tuple[str, str]]:
    """What frozen groups cannot be combined with; enough must remain to train."""
    still, recipe = "recipe.groups: frozen = true", config.recipe
    if config.model.lora is not None:
        yield f"{still} with model.lora, which freezes all weights", "leave out one of them"
    if recipe.optimizer in WHOLE:
        yield f'{still} with recipe.optimizer = "{recipe.optimizer}"', 'recipe.optimizer = "adamw"'
    if recipe.ema:
        yield f"{still} with recipe.ema", "recipe.ema = 0"
    if recipe.precision == "fp8":
        yield f'{still} with recipe.precision = "fp8"', 'recipe.precision = "bf16"'
    if config.server.servers:
        yield f"{still} with server.servers", "server.servers = 0"
    if layout.offload:
        yield f"{still} with layout: offload={layout.offload[0].what}", "offload=none"
    if model is None:
        return
    for stage in cut(model, layout.pp * layout.chunks, recipe.seq):
        if all(recipe.frozen(one.name) for _, one in stage_parameters(model, stage, layout.pp)):
            what = (
                "of all parameters" if layout.pp == 1 else f"of all parameters of stage {stage.index} of pp"
            )
            yield f"{still} {what}", "train some" if layout.pp == 1 else "pp=1, or train some of each stage"
            return


def _with_blocks(config: Config, layout: Layout) -> Iterator[tuple[str, str]]:
    """What 8-bit moments cannot be combined with: updates that ignore blocks."""
    lean = 'recipe.states = "int8"'
    if config.recipe.optimizer != "adamw":
        yield f'{lean} with recipe.optimizer = "{config.recipe.optimizer}"', 'recipe.states = "bf16"'
    if waiting(layout.offload, "optimizer") is not None:
        yield f"{lean} with layout: offload=optimizer", 'recipe.states = "bf16", or offload=none'
    if config.server.servers:
        yield f"{lean} with server.servers", 'recipe.states = "bf16", or server.servers = 0'


def _unmatched_groups(config: Config, model: Model) -> Iterator[Problem]:
    """Recipe groups that match no parameter."""
    if not config.recipe.groups:
        return
    names = [one.name for one in llama_parameters(model)]
    for number, group in enumerate(config.recipe.groups):
        if not any(map(group.matches, names)):
            # Blocks are alike, so the first one's names stand for all.
            shown = [one for one in names if not one.startswith(BLOCKS) or one.startswith(f"{BLOCKS}0.")]
            near = get_close_matches(group.match, shown, 3, 0.3) or shown[:3]
            yield Problem(
                f"recipe.groups.{number}: match = {group.match!r} matches no parameter of {model.name}",
                f"a glob over canonical names; the nearest are {', '.join(near)}",
                "recipe.groups",
            )


def _unmatched_targets(lora: Lora, model: Model) -> Iterator[Problem]:
    """Adapter targets that no block has."""
    there = projections(model)
    wrong = [target for target in lora.targets_in(model) if target not in there]
    if wrong:
        routed = any(one.name.rsplit(".", 2)[-2] == wrong[0] for one in expert_parameters(model))
        frozen = " but those of routed experts, which stay frozen" if routed else ""
        yield Problem(
            f"model.lora.targets: {model.name} has no projection {wrong[0]!r}{frozen}",
            f'some of {", ".join(there)}; or targets = "{EVERY_PROJECTION}", all of these',
            "model.lora",
        )


def _cut_blocks(model: Model, layout: Layout) -> Iterator[Problem]:
    """Projections that cannot be packed in blocks of 64 values, or of which tensor ranks would cut one."""
    if wrong := next(cut_blocks(model, layout), None):
        whole = next(cut_blocks(model, Layout()), None)
        fix = "a smaller tp" if whole is None else 'base = "bf16"'
        yield Problem(
            f'model.lora.base = "nf4": {wrong} of {model.name} has rows that {BLOCK} values do not divide'
            + ("" if layout.tp == 1 else f" with tp={layout.tp}"),
            fix,
            "model.lora",
        )


def _in_model(config: Config, model: Model) -> Iterator[tuple[str, str]]:
    if model.experts is not None and config.recipe.precision == "fp8":
        yield f'recipe.precision = "fp8" with the experts of {model.name}', 'recipe.precision = "bf16"'
    for key in ("router_aux", "router_z"):
        if model.experts is None and getattr(config.recipe, key):
            what = f"recipe.{key} = {getattr(config.recipe, key):g} with {model.name}, which has no experts"
            yield what, f"recipe.{key} = 0"


def _in_config(config: Config) -> Iterator[tuple[str, str]]:
    if config.recipe.batch_ramp and (config.recipe.router_aux or config.recipe.router_z):
        # Router losses are means over a batch size that is fixed when the network is built.
        yield "recipe.batch_ramp with recipe.router_aux or recipe.router_z", "leave one of them out"
    if config.run.strict and config.recipe.precision in ("fp16", "fp8"):
        # fp16's loss scale and fp8's activation scales depend on the rest of the batch.
        what = f'run.strict with recipe.precision = "{config.recipe.precision}"'
        yield what, 'recipe.precision = "bf16" or "fp32"'
    if config.run.strict and config.recipe.states != "fp32" and config.recipe.precision == "fp32":
        # One process rounds a gradient to bf16 before the exact sum, sharded ranks after it.
        what = f'run.strict with recipe.states = "{config.recipe.states}" and recipe.precision = "fp32"'
        yield what, 'recipe.states = "fp32"'
    if config.run.strict and config.recipe.optimizer == "adafactor":
        # Adafactor's row and column means are sums in the order of ranks' parts.
        yield 'run.strict with recipe.optimizer = "adafactor"', 'recipe.optimizer = "adamw"'
    if config.recipe.loss_facts.of_log_probabilities and config.recipe.z_loss:
        yield f'recipe.z_loss with recipe.loss = "{config.recipe.loss}"', "recipe.z_loss = 0"
    if config.evaluate.ema and not config.recipe.ema:
        yield "evaluate.ema without recipe.ema", "recipe.ema = 0.999, or evaluate.ema = false"
    if config.model.lora is not None and config.recipe.optimizer in WHOLE:
        yield f'model.lora with recipe.optimizer = "{config.recipe.optimizer}"', 'recipe.optimizer = "adamw"'
    if config.model.lora is not None and config.recipe.precision == "fp8":
        # Adapters are narrower than fp8 products support.
        yield 'model.lora with recipe.precision = "fp8"', 'recipe.precision = "bf16"'
    if config.model.lora is not None and config.server.servers:
        yield "model.lora with server.servers", "server.servers = 0"
