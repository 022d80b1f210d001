"""A workload: everything that determines the cost of a step, in one value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shoal.facts import nf4
from shoal.facts.bytes_per_parameter import takes_narrow_gradients
from shoal.facts.cluster import Cluster
from shoal.facts.cluster.stack import SHOAL, Stack
from shoal.facts.compilation import compilation
from shoal.facts.config import Lora, TuneSection
from shoal.facts.expert_load import crossing
from shoal.facts.layout import Layout
from shoal.facts.layout.expert_nodes import ExpertNodes, expert_nodes, part_sizes, parts_over
from shoal.facts.layout.float8 import gathered_width
from shoal.facts.layout.parameter_groups import ParameterGroup, RankGroup, communicators, parameter_groups
from shoal.facts.model import Model
from shoal.facts.recipe import Recipe

USUAL = TuneSection()


@dataclass(frozen=True)
class Workload:
    """A model trained by a recipe, in a layout, on a cluster, with a software stack."""

    model: Model
    cluster: Cluster
    recipe: Recipe
    layout: Layout
    stack: Stack = SHOAL
    tune: TuneSection = USUAL
    lora: Lora | None = None
    compile: bool | None = None  # as compile.enabled; None leaves it to the device

    @property
    def network(self) -> Model:
        """The model as trained: with its adapters."""
        if self.lora is None:
            return self.model
        return self.model.model_copy(update={"adapters": self.lora.adapters_of(self.model)})

    @cached_property
    def gathered_width(self) -> float:
        """Bytes per value of a sharded projection when all-gathered."""
        if self.lora is not None and self.lora.base == "nf4":
            return float(nf4.WIDTH)
        return gathered_width(self.recipe)

    @cached_property
    def compiled(self) -> bool:
        """Whether the engine compiles blocks. Other stacks' compilation is part of ``stack``."""
        if self.stack.name != SHOAL.name:
            return False
        on_gpu, precision = self.cluster.device.name != "cpu", self.recipe.precision
        return compilation(self.compile, on_gpu, self.layout, precision, strict=False).on

    @cached_property
    def micro(self) -> int:
        """Sequences in one micro-batch of one data rank."""
        return self.layout.micro_batch(self.recipe.batch)

    @cached_property
    def accumulation(self) -> int:
        """Micro-batches per data rank and step."""
        return self.layout.accumulation(self.recipe.batch)

    @cached_property
    def one_pass(self) -> bool:
        return self.layout.one_pass(self.recipe.batch)

    @cached_property
    def narrow_gradients(self) -> bool:
        """Whether gradients stay in the compute precision."""
        may = self.stack.narrow_gradients and self.one_pass
        return may and takes_narrow_gradients(self.recipe.precision, self.recipe.optimizer)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch that one rank attends for: with context parallelism its part of the sequences."""
        return self.micro * self.recipe.seq // self.layout.cp

    @cached_property
    def groups(self) -> dict[str, ParameterGroup]:
        return parameter_groups(self.layout, self.model.experts is not None, self.lora is not None)

    @cached_property
    def expert_nodes(self) -> ExpertNodes:
        """How tokens travel to experts; nodes do not matter in stacks that send each copy straight to its rank."""
        domain = self.cluster.apart if self.stack.sends_once else None
        return expert_nodes(self.layout, domain, self.model.experts.active if self.model.experts else 1)

    @cached_property
    def crossing(self) -> int:
        """Token copies that a micro-batch sends across nodes, one per node with an expert of theirs; as many arrive.

        0: all experts are on one node.
        """
        return sum(count * self.crossing_of(tokens) for tokens, count in self.token_parts)

    def crossing_of(self, tokens: int) -> int:
        nodes = self.expert_nodes.across.size
        return crossing(self.model.experts, tokens, nodes) if self.model.experts and nodes > 1 else 0

    @property
    def expert_parts(self) -> int:
        """Parts in which a micro-batch's tokens travel to their experts."""
        return 1 if self.stack.passes_on else parts_over(*(one.size for one in self.expert_nodes))

    @cached_property
    def token_parts(self) -> list[tuple[int, int]]:
        """These parts as (tokens per part, number of such parts)."""
        sizes = part_sizes(self.tokens, self.expert_parts)
        return [(size, sizes.count(size)) for size in dict.fromkeys(sizes)]

    @cached_property
    def _communicators(self) -> dict[str, RankGroup]:
        found = communicators(self.layout, self.model.kv_heads)
        if self.layout.ep > 1:
            found = {**found, **{one.name: one for one in self.expert_nodes}}
        return found

    def ranks_of(self, group: str) -> RankGroup:
        """The ranks of a call's group; all ranks if the group is not a named one."""
        return self._communicators.get(group) or self._communicators["control"]

    @property
    def cut_by(self) -> int | None:
        """The sequence length that weighs attention when stages are cut; None if the stack cuts by number of layers."""
        return None if self.stack.even_stages else self.recipe.seq
