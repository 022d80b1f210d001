"""Legality rules: which layouts a model, a recipe and a cluster allow.

All rules are checked and all violations reported together, each with the nearest legal value. That value is found
by trial: it is suggested only if it fixes the rule and, where possible, breaks no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import lcm

from shoal.facts.blockwise import cuts_a_block
from shoal.facts.cluster import Cluster
from shoal.facts.layout import DEFAULT_CHUNKS, ONE_CHUNK, V_SHAPED, Layout, divisors, float8
from shoal.facts.layout.parameter_groups import experts_fit
from shoal.facts.layout.sequence import length_unit, piece_count
from shoal.facts.model import Model
from shoal.facts.problem import BadInput, Problem
from shoal.facts.recipe import Recipe
from shoal.facts.strategies import STRATEGIES


@dataclass(frozen=True)
class Case:
    """The input of every rule."""

    layout: Layout
    model: Model
    seq: int
    batch: int
    cluster: Cluster | None
    strict: bool
    fp8: bool
    rows: int = 1  # sequences that must stay together in one micro-batch
    blockwise: bool = False

    @classmethod
    def of(
        cls,
        layout: Layout,
        model: Model,
        recipe: Recipe,
        cluster: Cluster | None = None,
        strict: bool = False,
    ) -> Case:
        return cls(
            layout,
            model,
            recipe.seq,
            recipe.batch,
            cluster,
            strict,
            recipe.precision == "fp8",
            recipe.loss_facts.rows,
            recipe.blockwise,
        )


@dataclass(frozen=True)
class Violation:
    rule: str
    what: str
    cures: tuple[str, ...]  # keys whose change may fix it, best first
    otherwise: str = ""  # the suggestion if no single value fixes it


def check(
    layout: Layout, model: Model, recipe: Recipe, cluster: Cluster | None = None, strict: bool = False
) -> None:
    """Raise one ``BadInput`` that lists every violated rule."""
    problems = violations(layout, model, recipe, cluster, strict)
    if problems:
        raise BadInput(problems)


def violations(
    layout: Layout, model: Model, recipe: Recipe, cluster: Cluster | None = None, strict: bool = False
) -> list[Problem]:
    """Every violated rule with its fix."""
    case = Case.of(layout, model, recipe, cluster, strict)
    found = list(broken(case))
    rules = {violation.rule for violation in found}
    return [Problem(violation.what, _fix(case, violation, rules)) for violation in found]


def broken(case: Case) -> Iterator[Violation]:
    """Every violated rule, without searching for fixes: a planner calls this for thousands of layouts."""
    for rules in (
        _lengths,
        _batch,
        _tensor,
        _blocks,
        _context,
        _pipeline,
        _experts,
        _float8,
        _strict,
        _world,
    ):
        yield from rules(case)


def worlds(cluster: Cluster | None) -> range | None:
    """The world sizes that a cluster accepts; None: any."""
    # Processes share a CPU, so any world size runs on any machine.
    if cluster is None or cluster.device.name == "cpu":
        return None
    # On this machine the user may leave devices idle.
    least = 1 if cluster.name == "local" else cluster.devices
    return range(least, cluster.devices + 1)


def nearest_divisor(wanted: int, total: int) -> int:
    """The divisor of ``total`` closest to ``wanted``; the smaller one on a tie."""
    return nearest_first(wanted, divisors(total))[0]


def nearest_multiple(wanted: int, unit: int) -> int:
    """The positive multiple of ``unit`` closest to ``wanted``; the smaller one on a tie."""
    below = wanted // unit * unit
    return nearest_first(wanted, (max(unit, below), below + unit))[0]


def nearest_first(wanted: int, values: Iterable[int]) -> list[int]:
    """The values, sorted by distance from ``wanted``."""
    return sorted(values, key=lambda value: (abs(value - wanted), value))


# The rules.


def beyond_positions(model: Model, seq: int) -> str | None:
    """A warning for rows longer than a rotary model's positions: no rule forbids it, but few models handle it well."""
    if model.positions == "learned" or seq <= model.max_positions:
        return None
    return (
        f"seq={seq} is longer than the {model.max_positions:,} positions of {model.name}, beyond which it"
        f" has not been trained: recipe.seq = {model.max_positions} or less, or a model with a larger max_positions"
    )


def _lengths(case: Case) -> Iterator[Violation]:
    # Rotary positions extrapolate beyond the trained range; a learned table ends.
    most = case.model.max_positions
    if case.model.positions == "learned" and case.seq > most:
        what = f"seq={case.seq} is longer than the {most} learned positions of {case.model.name}"
        yield Violation("positions", what, ("recipe.seq",), f"recipe.seq = {most} or less")


def _batch(case: Case) -> Iterator[Violation]:
    layout, micro, rows = case.layout, case.layout.micro or case.rows, case.rows
    if layout.micro is not None and layout.micro % rows:
        what = f"micro={layout.micro} parts sequences that the loss compares: {rows} of them belong together"
        yield Violation("together", what, ("micro",))
        return
    share = layout.data_ranks * micro
    if case.batch % share == 0:
        return
    written = f"dp·fsdp = {share}"
    if layout.micro:
        written = f"dp·fsdp·micro = {layout.data_ranks}·{micro} = {share}"
    elif rows > 1:
        written = (
            f"dp·fsdp·{rows} = {layout.data_ranks}·{rows} = {share}, for {rows} sequences belong together"
        )
    other = "micro" if case.batch % (layout.data_ranks * rows) == 0 else "fsdp" if layout.fsdp > 1 else "dp"
    yield Violation("batch", f"batch={case.batch} does not divide by {written}", ("recipe.batch", other))


def _tensor(case: Case) -> Iterator[Violation]:
    layout, model, tp = case.layout, case.model, case.layout.tp
    if tp == 1:
        return
    if model.heads % tp:
        what = f"tp={tp} does not divide the {model.heads} attention heads of {model.name}"
        yield Violation("heads", what, ("tp",))
    # With fewer key/value heads than ranks, each head is replicated on several ranks; that needs a whole multiple.
    if model.kv_heads % tp and tp % model.kv_heads:
        what = f"tp={tp} and the {model.kv_heads} key/value heads of {model.name}: neither divides the other"
        yield Violation("key/value heads", what, ("tp",))
    for width, part in _mlp_widths(model):
        if width % tp:
            what = f"tp={tp} does not divide the {part} width {width} of {model.name}"
            yield Violation(f"{part} width", what, ("tp",))
    tokens = case.seq // layout.cp
    if layout.sp and tokens % tp:
        what = f"sequence parallel: tp={tp} does not divide the {tokens} tokens of a rank's sequence"
        yield Violation("sequence parallel", what, ("sp", "recipe.seq"))


def _mlp_widths(model: Model) -> Iterator[tuple[int, str]]:
    if model.experts is None or model.experts.dense_layers:
        yield model.ffn, "MLP"
    if model.experts is not None and model.experts.shared_ffn:
        yield model.experts.shared_ffn, "shared experts'"


def _blocks(case: Case) -> Iterator[Violation]:
    cut = cuts_a_block(case.model, case.layout.tp) if case.blockwise else None
    if cut is not None:
        what = (
            f'tp={case.layout.tp} would cut blocks of {cut}, whose moments share a scale with states = "int8"'
        )
        yield Violation("blocks", what, ("tp",), 'recipe.states = "bf16"')


def _context(case: Case) -> Iterator[Violation]:
    layout, model, cp = case.layout, case.model, case.layout.cp
    if cp == 1:
        return
    pieces = piece_count(layout)
    if case.seq % pieces:
        what = f"cp={cp} ({layout.cp_kind}) needs seq={case.seq} to divide by {pieces}"
        yield Violation("context length", what, ("recipe.seq", "cp"))
    if layout.cp_kind == "ulysses" and model.heads % (layout.tp * cp):
        split = f"tp·cp = {layout.tp * cp}"
        what = f"cp_kind=ulysses: {split} does not divide the {model.heads} heads of {model.name}"
        yield Violation("ulysses heads", what, ("cp", "cp_kind"))
    # As for tensor ranks: with fewer key/value heads than ranks, several ranks receive the same head.
    key_heads = max(1, model.kv_heads // layout.tp)
    if layout.cp_kind == "ulysses" and key_heads % cp and cp % key_heads:
        what = f"cp_kind=ulysses: of cp={cp} and {key_heads} key/value heads a tensor rank, neither divides the other"
        yield Violation("ulysses key/value heads", what, ("cp", "cp_kind"))


def _pipeline(case: Case) -> Iterator[Violation]:
    layout, model = case.layout, case.model
    if layout.pp == 1:
        return
    needed = DEFAULT_CHUNKS.get(layout.schedule, 1)
    if layout.schedule in (*ONE_CHUNK, *V_SHAPED) and layout.chunks != needed:
        what = f"schedule={layout.schedule} has {needed} chunk(s) per rank, not {layout.chunks}"
        yield Violation("chunks", what, ("chunks",), f"chunks={needed}")
    if layout.schedule == "interleaved" and layout.chunks < 2:
        what = "schedule=interleaved needs at least 2 chunks per rank"
        yield Violation("interleaved", what, ("chunks", "schedule"))
    stages = layout.pp * layout.chunks
    if model.layers < stages:
        what = (
            f"pp·chunks = {stages} stages, but {model.name} has {model.layers} layers: a stage would be empty"
        )
        yield Violation("stages", what, ("pp", "chunks"))


def _experts(case: Case) -> Iterator[Violation]:
    layout, model, ep = case.layout, case.model, case.layout.ep
    if ep == 1:
        return
    if model.experts is None:
        yield Violation("no experts", f"ep={ep}, but {model.name} has no experts", ("ep",))
    elif model.experts.count % ep:
        what = f"ep={ep} does not divide the {model.experts.count} experts of {model.name}"
        yield Violation("experts", what, ("ep",))
    if model.experts is not None and model.hidden % layout.tp:
        # Each tensor rank sends its own features of every token.
        what = f"ep={ep}: tp={layout.tp} does not divide the hidden width {model.hidden} of {model.name}"
        yield Violation("expert features", what, ("tp", "ep"))
    ranks = layout.data_ranks * layout.cp
    if ranks % ep:
        what = f"ep={ep} must divide dp·fsdp·cp = {ranks}: experts live on those ranks"
        yield Violation("expert ranks", what, ("ep",))
    elif not experts_fit(ep, layout.shards):
        what = (
            f"ep={ep} and the {layout.shards} ranks of fsdp·cp that share one copy: neither divides the other"
        )
        yield Violation("expert ranks", what, ("ep", "fsdp"))


def _float8(case: Case) -> Iterator[Violation]:
    """fp8 kernels need multiples of 16 in a rank's features and in a micro-batch's tokens."""
    if not case.fp8:
        return
    layout, model, tp = case.layout, case.model, case.layout.tp
    # Each width with the number of ranks that split it.
    widths = {
        "hidden": (model.hidden, 1),
        "query": (model.heads * model.head_dim, tp),
        "key/value": (model.kv_heads * model.head_dim, min(tp, model.kv_heads)),
        "MLP": (model.ffn, tp),
    }
    for part, (width, ranks) in widths.items():
        if width % (ranks * float8.TILE):
            whole = f"the {part} width {width} of {model.name}"
            what = f"one of {ranks} tensor ranks' part of {whole}" if ranks > 1 else whole
            what = f'precision "fp8": {what} is not a multiple of {float8.TILE}'
            yield Violation(f"fp8 {part}", what, ("tp",) if ranks > 1 else (), 'recipe.precision = "bf16"')
    tokens = (layout.micro or 1) * case.seq // layout.cp
    if tokens % float8.TILE:
        what = f'precision "fp8": a micro-batch has {tokens} tokens, not a multiple of {float8.TILE}'
        yield Violation("fp8 tokens", what, ("recipe.seq", "micro"), 'recipe.precision = "bf16"')


def _strict(case: Case) -> Iterator[Violation]:
    if not case.strict:
        return
    for axis in (one.key for one in STRATEGIES if not one.strict):
        degree = getattr(case.layout, axis)
        if degree > 1:
            what = f"run.strict: {axis}={degree} sums in a different order than one rank"
            yield Violation(f"strict {axis}", what, (axis,), f"{axis}=1, or run.strict = false")
    if case.layout.micro not in (None, case.rows):
        least = "one sequence" if case.rows == 1 else f"{case.rows} sequences, which belong together,"
        what = f"run.strict works on {least} at a time; micro={case.layout.micro}"
        yield Violation("strict micro", what, ("micro",), f"micro={case.rows}, or run.strict = false")


def _world(case: Case) -> Iterator[Violation]:
    layout, cluster = case.layout, case.cluster
    taken = worlds(cluster)
    if cluster is None or taken is None or layout.world in taken:
        return
    what = (
        f"layout {layout} has {layout.world} rank(s), cluster {cluster.name} has {cluster.devices} device(s)"
    )
    otherwise = f"degrees dp·fsdp·tp·cp·pp whose product is {cluster.devices}, or layout auto"
    yield Violation("world", what, ("dp", "fsdp"), otherwise)


# The search for a fix.


def _fix(case: Case, violation: Violation, rules: set[str]) -> str:
    """The nearest legal value of each key that can fix the violation, preferring values that break no other rule."""

    def cured(changed: Case) -> bool:
        return violation.rule not in {other.rule for other in broken(changed)}

    def harmless(changed: Case) -> bool:
        return cured(changed) and {other.rule for other in broken(changed)} < rules

    for good in (harmless, cured):
        fixes = [fix for key in violation.cures if (fix := _nearest_legal(case, key, good))]
        if fixes:
            return " or ".join(fixes)
    return violation.otherwise or "layout auto"


def _nearest_legal(case: Case, key: str, good: Callable[[Case], bool]) -> str:
    for value in _candidates(case, key):
        if key == "recipe.seq":
            changed, written = replace(case, seq=int(value)), f"{key} = {value}"
        elif key == "recipe.batch":
            changed, written = replace(case, batch=int(value)), f"{key} = {value}"
        else:
            changed, written = replace(case, layout=case.layout.replace(**{key: value})), f"{key}={value}"
        if good(changed):
            return written
    return ""


def _candidates(case: Case, key: str) -> list[int] | list[str]:
    """Values worth trying, nearest first."""
    layout, model = case.layout, case.model
    if key == "sp":
        return [0]
    if key == "cp_kind":
        return ["ring"]
    if key == "schedule":
        return ["1f1b"]
    if key == "recipe.seq":
        return _sequence_lengths(case)
    if key == "recipe.batch":
        share = layout.data_ranks * (layout.micro or case.rows)
        return [nearest_multiple(case.batch, share)]
    devices = divisors(case.cluster.devices) if case.cluster else []
    values = {
        "dp": {*divisors(case.batch), *devices},
        "fsdp": {*divisors(case.batch), *devices},
        "micro": divisors(case.batch),
        "tp": divisors(model.heads),
        "cp": divisors(case.seq),
        "pp": range(1, model.layers + 1),
        "chunks": range(1, max(2, model.layers // layout.pp) + 1),
        "ep": divisors(model.experts.count) if model.experts else [1],
    }[key]
    return nearest_first(getattr(layout, key) or 1, values)


def _sequence_lengths(case: Case) -> list[int]:
    layout = case.layout
    unit = lcm(length_unit(layout), float8.TILE if case.fp8 else 1)
    most = case.model.max_positions if case.model.positions == "learned" else case.seq + unit
    return [min(nearest_multiple(case.seq, unit), most // unit * unit)] if unit <= most else []
