"""Layout: where the work happens. Degrees and policies, written ``fsdp=4,tp=2`` and never changing the mathematics."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from shoal.facts.problem import BadInput, Problem, did_you_mean

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"]
Recompute = Literal["none", "selective", "full"]
ContextKind = Literal["ring", "ulysses"]
Zero = Literal[1, 2, 3]

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev")
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
CONTEXT_KINDS: tuple[ContextKind, ...] = ("ring", "ulysses")
OFFLOADABLE = ("optimizer", "params", "activations")

# V-shaped schedules give every rank two chunks, one on the way down and one on the way up.
DEFAULT_CHUNKS: dict[str, int] = {"interleaved": 2, "zbv": 2, "dualpipev": 2}


class Offload(BaseModel):
    """One kind of state that waits off the device: how much of it, and where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: Literal["optimizer", "params", "activations"]
    fraction: float = 1.0
    nvme: bool = False

    def __str__(self) -> str:
        fraction = "" if self.fraction == 1.0 else f":{self.fraction:g}"
        return f"{self.what}{fraction}{'@nvme' if self.nvme else ''}"


class Layout(BaseModel):
    """Degrees and policies in CONTRACT's words; unset degrees are 1.

    A policy whose group has one member does nothing, so it is brought to its default here: two layouts that
    place the work alike are equal, hash alike and print alike.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dp: int = 1
    fsdp: int = 1
    zero: Zero = 3
    unit: int = 1
    tp: int = 1
    sp: bool = True
    cp: int = 1
    cp_kind: ContextKind = "ring"
    pp: int = 1
    schedule: Schedule = "1f1b"
    chunks: int = 1
    ep: int = 1
    micro: int | None = None
    recompute: Recompute = "none"
    offload: tuple[Offload, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _idle_policies_are_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields = dict(given)
        if fields.get("pp", 1) == 1:
            fields.pop("schedule", None)
            fields.pop("chunks", None)
        else:
            fields.setdefault("chunks", DEFAULT_CHUNKS.get(fields.get("schedule", "1f1b"), 1))
        idle = {
            "zero": fields.get("fsdp", 1) * fields.get("cp", 1) == 1,
            "unit": fields.get("fsdp", 1) * fields.get("cp", 1) == 1,
            "sp": fields.get("tp", 1) == 1,
            "cp_kind": fields.get("cp", 1) == 1,
        }
        return {name: value for name, value in fields.items() if not idle.get(name, False)}

    @property
    def world(self) -> int:
        return self.dp * self.fsdp * self.tp * self.cp * self.pp

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.dp * self.fsdp

    @property
    def degrees(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("dp", "fsdp", "tp", "cp", "pp", "ep")}

    def micro_batch(self, batch: int) -> int:
        """Sequences in one micro-batch of one data rank, as written or by CONTRACT's rule."""
        if self.micro is not None:
            return self.micro
        per_rank = max(1, batch // self.data_ranks)
        if self.pp == 1:
            return per_rank
        wanted = 2 * self.pp if self.schedule in ("zbv", "dualpipev") else self.pp
        fitting = [
            size for size in range(1, per_rank + 1) if per_rank % size == 0 and per_rank // size >= wanted
        ]
        return max(fitting, default=1)

    def accumulation(self, batch: int) -> int:
        """Micro-batches that one data rank works through in a step."""
        return batch // (self.data_ranks * self.micro_batch(batch))

    def __str__(self) -> str:
        """Canonical order, defaults left out; what is printed is read back as the same layout."""
        pairs = [f"{name}={getattr(self, name)}" for name in ("dp", "fsdp") if getattr(self, name) != 1]
        if self.zero != 3:
            pairs.append(f"zero={self.zero}")
        if self.unit != 1:
            pairs.append(f"unit={self.unit}")
        if self.tp != 1:
            pairs.append(f"tp={self.tp}")
        if not self.sp:
            pairs.append("sp=0")
        if self.cp != 1:
            pairs.append(f"cp={self.cp}")
        if self.cp_kind != "ring":
            pairs.append(f"cp_kind={self.cp_kind}")
        if self.pp != 1:
            pairs.append(f"pp={self.pp}")
            if self.schedule != "1f1b":
                pairs.append(f"schedule={self.schedule}")
            if self.chunks != DEFAULT_CHUNKS.get(self.schedule, 1):
                pairs.append(f"chunks={self.chunks}")
        if self.ep != 1:
            pairs.append(f"ep={self.ep}")
        if self.micro is not None:
            pairs.append(f"micro={self.micro}")
        if self.recompute != "none":
            pairs.append(f"recompute={self.recompute}")
        if self.offload:
            pairs.append("offload=" + "+".join(str(part) for part in self.offload))
        return ",".join(pairs) or "dp=1"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``key=value`` pairs separated by commas or spaces. Everything wrong is reported together."""
        fields: dict[str, Any] = {}
        problems: list[Problem] = []
        for pair in re.split(r"[,\s]+", text.strip()):
            if not pair:
                continue
            name, equals, value = pair.partition("=")
            if name not in READERS:
                problems.append(Problem(f"layout: unknown key {name!r}", did_you_mean(name, READERS)))
            elif not equals or not value:
                problems.append(
                    Problem(f"layout: {name!r} has no value", f"write {name}=…, as in 'fsdp=4,tp=2'")
                )
            elif name in fields:
                problems.append(Problem(f"layout: {name!r} is given twice", f"keep one {name}=…"))
            else:
                try:
                    fields[name] = READERS[name](value)
                except ValueError as error:
                    problems.append(
                        Problem(f"layout: {name}={value}: {error}", "shoal layouts look like 'fsdp=4,tp=2'")
                    )
        if problems:
            raise BadInput(problems)
        return cls(**fields)


def _positive(value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < 1:
        raise ValueError("must be a whole number from 1 up")
    return int(value)


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}; {did_you_mean(value, choices)}")
        return value

    return read


def _zero(value: str) -> int:
    return int(_one_of("1", "2", "3")(value))


def _switch(value: str) -> bool:
    return _one_of("0", "1")(value) == "1"


def _offload(value: str) -> tuple[Offload, ...]:
    if value == "none":
        return ()
    parts: dict[str, Offload] = {}
    for part in value.split("+"):
        match = re.fullmatch(r"([a-z]+)(?::([0-9.]+))?(@nvme)?", part)
        if not match or match[1] not in OFFLOADABLE:
            raise ValueError(
                f"{part!r} is not one of {', '.join(OFFLOADABLE)}, each with an optional :fraction and @nvme"
            )
        try:
            fraction = float(match[2]) if match[2] else 1.0
        except ValueError:
            raise ValueError(f"{match[2]!r} is not a fraction") from None
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f"the fraction of {match[1]} must lie in (0, 1]")
        if match[1] in parts:
            raise ValueError(f"{match[1]} is given twice")
        parts[match[1]] = Offload.model_validate(
            {"what": match[1], "fraction": fraction, "nvme": match[3] is not None}
        )
    return tuple(parts[what] for what in OFFLOADABLE if what in parts)


# One reader a key, in canonical order.
READERS: dict[str, Callable[[str], Any]] = {
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
