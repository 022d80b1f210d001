"""Layout: degrees and policies, written ``fsdp=4,tp=2``. A layout never changes the mathematics."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from math import isqrt
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shoal.facts.input.foreign_terms import VALUES, layout_pair, meaning
from shoal.facts.problem import BadInput, Problem, closest, did_you_mean, shorten
from shoal.facts.recipe import Recipe

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"]
Recompute = Literal["none", "selective", "full"]
ContextKind = Literal["ring", "ulysses"]
Zero = Literal[1, 2, 3]

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev")
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
CONTEXT_KINDS: tuple[ContextKind, ...] = ("ring", "ulysses")
DEGREES = ("dp", "fsdp", "tp", "cp", "pp", "ep")
OFFLOADABLE = ("optimizer", "params", "activations")

# V-shaped schedules place stages down the ranks and back up, so rank 0 has the first and the last: always two
# chunks per rank.
V_SHAPED = ("zbv", "dualpipev")
ONE_CHUNK = ("gpipe", "1f1b")
DEFAULT_CHUNKS: dict[str, int] = {"interleaved": 2, "zbv": 2, "dualpipev": 2}

MOST = 10**9
Degree = Annotated[int, Field(ge=1, le=MOST, strict=True)]


class Offload(BaseModel):
    """One kind of state that is kept off the device: how much of it, and where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: Literal["optimizer", "params", "activations"]
    fraction: float = Field(1.0, gt=0, le=1)
    nvme: bool = False

    def __hash__(self) -> int:  # cheap, for the many tables of a search; equality still compares every field
        return hash(self.what)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The engine features it needs, whatever the fraction."""
        return (self.what, f"{self.what}@nvme") if self.nvme else (self.what,)

    def __str__(self) -> str:
        # Decimal prints every digit of the float and never an exponent.
        fraction = "" if self.fraction == 1.0 else f":{Decimal(repr(self.fraction)):f}"
        return f"{self.what}{fraction}{'@nvme' if self.nvme else ''}"


class Layout(BaseModel):
    """Degrees and policies; unset degrees are 1. Fields stand in the order in which a layout is printed.

    A policy whose group has one member does nothing, so it is brought to its default here: two layouts that
    place the work alike are equal, hash alike and print alike.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dp: Degree = 1
    fsdp: Degree = 1
    zero: Zero = 3
    unit: Degree = 1
    tp: Degree = 1
    sp: bool = True
    cp: Degree = 1
    cp_kind: ContextKind = "ring"
    pp: Degree = 1
    schedule: Schedule = "1f1b"
    chunks: Degree = 1
    ep: Degree = 1
    micro: Degree | None = None
    recompute: Recompute = "none"
    offload: tuple[Offload, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _idle_policies_are_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        alone = {axis: given.get(axis, 1) == 1 for axis in ("fsdp", "tp", "cp", "pp")}
        idle = {
            "zero": alone["fsdp"] and alone["cp"],
            "unit": alone["fsdp"] and alone["cp"],
            "sp": alone["tp"],
            "cp_kind": alone["cp"],
            "schedule": alone["pp"],
            "chunks": alone["pp"],
        }
        fields = {name: value for name, value in given.items() if not idle.get(name, False)}
        if not alone["pp"]:
            fields.setdefault("chunks", DEFAULT_CHUNKS.get(str(fields.get("schedule")), 1))
        return fields

    @field_validator("offload")
    @classmethod
    def _each_state_once_in_order(cls, parts: tuple[Offload, ...]) -> tuple[Offload, ...]:
        ordered = sorted(parts, key=lambda part: OFFLOADABLE.index(part.what))
        if len({part.what for part in parts}) < len(parts):
            raise ValueError("a state is given twice")
        return tuple(ordered)

    @property
    def world(self) -> int:
        return self.dp * self.fsdp * self.tp * self.cp * self.pp

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.dp * self.fsdp

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the states: context ranks shard with those of ``fsdp``."""
        return self.fsdp * self.cp

    @property
    def degrees(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in DEGREES}

    def micro_batch(self, batch: int) -> int:
        """Sequences in one micro-batch of one data rank: as written, else all of them or enough to fill a pipeline."""
        if self.micro is not None:
            return self.micro
        per_rank = max(1, batch // self.data_ranks)
        if self.pp == 1:
            return per_rank
        wanted = 2 * self.pp if self.schedule in V_SHAPED else self.pp
        return max((size for size in divisors(per_rank) if per_rank // size >= wanted), default=1)

    def accumulation(self, batch: int) -> int:
        """Micro-batches that one data rank works through in a step."""
        return accumulation(batch, self.data_ranks, self.micro_batch(batch))

    def one_pass(self, batch: int) -> bool:
        """One rank and one micro-batch: a gradient is complete as it is computed, nothing is ever added to it."""
        return self.world == 1 and self.accumulation(batch) == 1

    def positions(self, batch: int, data_rank: int) -> list[range]:
        """A data rank's places in the global batch, one range per micro-batch."""
        micro, count = self.micro_batch(batch), self.accumulation(batch)
        first = data_rank * count
        return [range(one * micro, (one + 1) * micro) for one in range(first, first + count)]

    def written(self) -> dict[str, Any]:
        """The fields that differ from their defaults, in canonical order."""
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        defaults["chunks"] = DEFAULT_CHUNKS.get(self.schedule, 1)
        fields = {name: getattr(self, name) for name in defaults}
        return {name: value for name, value in fields.items() if value != defaults[name]}

    def replace(self, **changes: Any) -> Layout:
        """This layout with other values. What was not written, such as the chunks of a schedule, is derived anew."""
        return Layout(**{**self.written(), **changes})

    def __str__(self) -> str:
        """Canonical order, defaults left out; what is printed is read back as the same layout."""
        return ",".join(f"{name}={printed(value)}" for name, value in self.written().items()) or "dp=1"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``key=value`` pairs separated by commas or spaces. Everything wrong is reported together."""
        pairs = [pair for pair in re.split(r"[,\s]+", text) if pair]
        if not pairs:
            raise BadInput("layout: it is empty", "dp=1 is one rank alone; auto lets Shoal choose")
        fields: dict[str, Any] = {}
        seen: set[str] = set()
        problems: list[Problem] = []
        for pair in pairs:
            name, _, value = pair.partition("=")
            if not name:
                fix = "no spaces around '=', as in 'fsdp=4,tp=2'"
                problems.append(Problem(f"layout: {pair!r} has no key before its '='", fix))
            elif name not in READERS:
                problems.append(Problem(f"layout: unknown key {name!r}", _meant(name, value)))
            elif not value:
                fix = f"write {name}=…, without spaces, as in 'fsdp=4,tp=2'"
                problems.append(Problem(f"layout: {name!r} has no value", fix))
            elif name in seen:
                problems.append(Problem(f"layout: {name!r} is given twice", f"keep one {name}=…"))
            else:
                try:
                    fields[name] = READERS[name](name, value)
                except BadInput as error:
                    problems.extend(error.problems)
            seen.add(name)
        if problems:
            raise BadInput(problems)
        return cls(**fields)


def parse_layouts(text: str) -> list[Layout]:
    """Parse ``--layouts``: layouts separated by ";". Reports every error in any of them at once."""
    found: list[Layout] = []
    problems: list[Problem] = []
    for part in text.split(";"):
        try:
            found += [Layout.parse(part)] if part.strip() else []
        except BadInput as error:
            problems += [replace(problem, where="--layouts") for problem in error.problems]
    if problems:
        raise BadInput(problems)
    return found


def accumulation(batch: int, data_ranks: int, micro: int) -> int:
    """Micro-batches of ``micro`` sequences per data rank and step. Everything that counts micro-batches uses this."""
    return batch // (data_ranks * micro)


def divisors(total: int) -> list[int]:
    """Every divisor of a number, ascending."""
    small = [part for part in range(1, isqrt(total) + 1) if total % part == 0]
    return sorted({*small, *(total // part for part in small)})


def printed(value: Any) -> str:
    """A value as a layout prints it."""
    if isinstance(value, bool):
        return str(int(value))
    return "+".join(str(part) for part in value) if isinstance(value, tuple) else str(value)


def _meant(name: str, value: str) -> str:
    """A hint for an unknown key: another tool's name for it, a recipe key, or a typo."""
    known = meaning(name)
    if known is not None:
        in_config = f"it is {known.key} of the config" if known.key else known.sentence
        return layout_pair(known.layout, value) if known.layout else in_config
    if name in Recipe.model_fields:
        return f"it is recipe.{name} of the config: a layout does not change the mathematics"
    return did_you_mean(name, READERS)


# A reader takes the key and its text, and raises BadInput if it cannot parse it.
Reader = Callable[[str, str], Any]


def _positive(name: str, value: str) -> int:
    if re.fullmatch(r"[0-9]{1,10}", value) and 1 <= int(value) <= MOST:
        return int(value)
    raise BadInput(
        f"layout: {name}={shorten(value, 60)}: must be a whole number from 1 to {MOST}", f"{name}=1 or more"
    )


def _one_of(*choices: str) -> Reader:
    def read(name: str, value: str) -> str:
        if value in choices:
            return value
        word = VALUES.get(value.lower(), "")
        meant = word if word in choices else closest(value, choices)
        fix = f"{name}={meant}" if meant else " or ".join(f"{name}={choice}" for choice in choices)
        raise BadInput(f"layout: {name}={shorten(value, 60)}: must be one of {', '.join(choices)}", fix)

    return read


def _zero(name: str, value: str) -> int:
    if value in ("1", "2", "3"):
        return int(value)
    raise BadInput(
        f"layout: {name}={shorten(value, 60)}: must be 1, 2 or 3",
        "zero=1 shards the optimizer, zero=2 also gradients, zero=3 also parameters; dp=N shards nothing",
    )


def _switch(name: str, value: str) -> bool:
    return bool(_one_of("0", "1")(name, value) == "1")


def _offload(name: str, value: str) -> tuple[Offload, ...]:
    if value == "none":
        return ()
    parts: dict[str, Offload] = {}
    problems = []
    for part in value.split("+"):
        match = re.fullmatch(r"([a-z]+)(?::([0-9]+\.?[0-9]*|\.[0-9]+))?(@nvme)?", part)
        if not match or match[1] not in OFFLOADABLE:
            fix = f"one of {', '.join(OFFLOADABLE)}, each with an optional :fraction and @nvme, as in params:0.5@nvme"
            problems.append(Problem(f"layout: {name}={value}: {part!r} is not understood", fix))
        elif not 0.0 < float(match[2] or 1) <= 1.0:
            what = f"layout: {name}={value}: {match[2]} is not a fraction of the {match[1]}"
            problems.append(Problem(what, f"above 0 and up to 1, as in {match[1]}:0.5"))
        elif match[1] in parts:
            fix = f"keep one {match[1]}"
            problems.append(Problem(f"layout: {name}={value}: {match[1]} is given twice", fix))
        else:
            parts[match[1]] = Offload.model_validate(
                {"what": match[1], "fraction": float(match[2] or 1), "nvme": match[3] is not None}
            )
    if problems:
        raise BadInput(problems)
    return tuple(parts.values())


READERS: dict[str, Reader] = {
    "dp": _positive,
    "fsdp": _positive,
    "zero": _zero,
    "unit": _positive,
    "tp": _positive,
    "sp": _switch,
    "cp": _positive,
    "cp_kind": _one_of(*CONTEXT_KINDS),
    "pp": _positive,
    "schedule": _one_of(*SCHEDULES),
    "chunks": _positive,
    "ep": _positive,
    "micro": _positive,
    "recompute": _one_of(*RECOMPUTES),
    "offload": _offload,
}
