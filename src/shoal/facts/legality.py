"""The algebra of legality: which layouts a model, a recipe and a cluster can take.

Every rule is checked and every violation reported at once, each with the nearest legal value.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.facts.cluster import Cluster
from shoal.facts.layout import DEFAULT_CHUNKS, Layout
from shoal.facts.model import Model
from shoal.facts.problem import BadInput, Problem
from shoal.facts.recipe import Recipe


def check(
    layout: Layout, model: Model, recipe: Recipe, cluster: Cluster | None = None, strict: bool = False
) -> None:
    """Raise one ``BadInput`` that holds every violated rule."""
    problems = violations(layout, model, recipe, cluster, strict)
    if problems:
        raise BadInput(problems)


def violations(
    layout: Layout, model: Model, recipe: Recipe, cluster: Cluster | None = None, strict: bool = False
) -> list[Problem]:
    problems = [
        *_lengths(model, recipe),
        *_batch(layout, recipe),
        *_tensor(layout, model, recipe),
        *_context(layout, model, recipe),
        *_pipeline(layout, model, recipe),
        *_experts(layout, model),
    ]
    if strict:
        problems.extend(_strict(layout))
    if cluster is not None:
        problems.extend(_world(layout, cluster))
    return problems


def nearest_divisor(wanted: int, total: int) -> int:
    """The divisor of ``total`` that is closest to ``wanted``; the smaller of two that are equally close."""
    divisors = {
        part
        for small in range(1, int(total**0.5) + 1)
        if total % small == 0
        for part in (small, total // small)
    }
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), divisor))


def nearest_multiple(wanted: int, unit: int) -> int:
    return max(unit, round(wanted / unit) * unit)


def _lengths(model: Model, recipe: Recipe) -> Iterator[Problem]:
    # Rotary positions can be asked for beyond what the model has seen; a learned table simply ends.
    if model.positions == "learned" and recipe.seq > model.max_positions:
        yield Problem(
            f"seq={recipe.seq} is longer than the {model.max_positions} learned positions of {model.name}",
            f"recipe.seq = {model.max_positions}",
        )


def _batch(layout: Layout, recipe: Recipe) -> Iterator[Problem]:
    micro = layout.micro or 1
    share = layout.data_ranks * micro
    if recipe.batch % share == 0:
        return
    written = (
        f"dp·fsdp·micro = {layout.data_ranks}·{micro} = {share}" if layout.micro else f"dp·fsdp = {share}"
    )
    fixes = [f"recipe.batch = {nearest_multiple(recipe.batch, share)}"]
    if layout.micro and recipe.batch % layout.data_ranks == 0:
        fixes.append(f"micro={nearest_divisor(micro, recipe.batch // layout.data_ranks)}")
    else:
        axis = "fsdp" if layout.fsdp > 1 else "dp"
        other = layout.dp if axis == "fsdp" else layout.fsdp
        if recipe.batch % (other * micro) == 0:
            fixes.append(f"{axis}={nearest_divisor(getattr(layout, axis), recipe.batch // (other * micro))}")
    yield Problem(f"batch={recipe.batch} does not divide by {written}", " or ".join(fixes))


def _tensor(layout: Layout, model: Model, recipe: Recipe) -> Iterator[Problem]:
    tp = layout.tp
    if tp == 1:
        return
    if model.heads % tp:
        yield Problem(
            f"tp={tp} does not divide the {model.heads} attention heads of {model.name}",
            f"tp={nearest_divisor(tp, model.heads)}",
        )
    # With fewer key/value heads than ranks, each head lives on several ranks; that needs whole multiples.
    if model.kv_heads % tp and tp % model.kv_heads:
        yield Problem(
            f"tp={tp} and the {model.kv_heads} key/value heads of {model.name}: neither divides the other",
            f"tp={nearest_divisor(tp, model.kv_heads)}",
        )
    for width, what in _mlp_widths(model):
        if width % tp:
            yield Problem(
                f"tp={tp} does not divide the {what} width {width} of {model.name}",
                f"tp={nearest_divisor(tp, width)}",
            )
    if layout.sp and (recipe.seq // layout.cp) % tp:
        yield Problem(
            f"sequence parallel: tp={tp} does not divide the {recipe.seq // layout.cp} tokens of a rank's sequence",
            f"sp=0, or recipe.seq = {nearest_multiple(recipe.seq, tp * layout.cp)}",
        )


def _mlp_widths(model: Model) -> Iterator[tuple[int, str]]:
    if model.experts is None or model.experts.dense_layers:
        yield model.ffn, "MLP"
    if model.experts is not None and model.experts.shared_ffn:
        yield model.experts.shared_ffn, "shared experts'"


def _context(layout: Layout, model: Model, recipe: Recipe) -> Iterator[Problem]:
    cp = layout.cp
    if cp == 1:
        return
    # Ring attention gives every rank one early and one late piece, so that causal work is even.
    pieces = 2 * cp if layout.cp_kind == "ring" else cp
    if recipe.seq % pieces:
        yield Problem(
            f"cp={cp} ({layout.cp_kind}) needs seq={recipe.seq} to divide by {pieces}",
            f"recipe.seq = {nearest_multiple(recipe.seq, pieces)}",
        )
    if layout.cp_kind == "ulysses" and model.heads % (layout.tp * cp):
        yield Problem(
            f"cp_kind=ulysses: tp·cp = {layout.tp * cp} does not divide the {model.heads} heads of {model.name}",
            f"cp={nearest_divisor(cp, max(1, model.heads // layout.tp))}, or cp_kind=ring",
        )


def _pipeline(layout: Layout, model: Model, recipe: Recipe) -> Iterator[Problem]:
    if layout.pp == 1:
        return
    needed = DEFAULT_CHUNKS.get(layout.schedule, 1)
    if layout.schedule in ("gpipe", "1f1b", "zbv", "dualpipev") and layout.chunks != needed:
        yield Problem(
            f"schedule={layout.schedule} has {needed} chunk(s) a rank, not {layout.chunks}",
            f"chunks={needed}",
        )
    if layout.schedule == "interleaved" and layout.chunks < 2:
        yield Problem("schedule=interleaved needs at least 2 chunks a rank", "chunks=2, or schedule=1f1b")
    stages = layout.pp * layout.chunks
    if model.layers < stages:
        yield Problem(
            f"pp·chunks = {stages} stages, but {model.name} has {model.layers} layers: a stage would be empty",
            f"pp={max(1, model.layers // layout.chunks)}",
        )
    if recipe.batch % layout.data_ranks == 0 and layout.schedule == "interleaved":
        count = layout.accumulation(recipe.batch)
        if count > layout.pp and count % layout.pp:
            yield Problem(
                f"schedule=interleaved works in rounds of pp={layout.pp} micro-batches; {count} is not a multiple",
                f"recipe.batch = {recipe.batch // count * nearest_multiple(count, layout.pp)}",
            )


def _experts(layout: Layout, model: Model) -> Iterator[Problem]:
    if layout.ep == 1:
        return
    if model.experts is None:
        yield Problem(f"ep={layout.ep}, but {model.name} has no experts", "ep=1")
    elif model.experts.count % layout.ep:
        yield Problem(
            f"ep={layout.ep} does not divide the {model.experts.count} experts of {model.name}",
            f"ep={nearest_divisor(layout.ep, model.experts.count)}",
        )
    ranks = layout.data_ranks * layout.cp
    if ranks % layout.ep:
        yield Problem(
            f"ep={layout.ep} must divide dp·fsdp·cp = {ranks}: experts live on those ranks",
            f"ep={nearest_divisor(layout.ep, ranks)}",
        )


def _strict(layout: Layout) -> Iterator[Problem]:
    for axis in ("tp", "cp", "ep"):
        degree = getattr(layout, axis)
        if degree > 1:
            yield Problem(
                f"run.strict: {axis}={degree} sums in another order than one rank does", f"{axis}=1"
            )
    if layout.micro not in (None, 1):
        yield Problem(f"run.strict works on one sequence at a time; micro={layout.micro}", "micro=1")


def _world(layout: Layout, cluster: Cluster) -> Iterator[Problem]:
    # Processes on a CPU share it, so any world runs on any machine.
    if cluster.device.name == "cpu" or layout.world == cluster.devices:
        return
    if cluster.name == "local" and layout.world < cluster.devices:
        return  # leaving some of this machine's devices idle is the user's choice
    rest = layout.world // layout.dp
    fix = (
        f"dp={cluster.devices // rest}"
        if cluster.devices % rest == 0
        else f"a layout of {cluster.devices} ranks"
    )
    yield Problem(
        f"layout {layout} has {layout.world} rank(s), cluster {cluster.name} has {cluster.devices} device(s)",
        fix,
    )
