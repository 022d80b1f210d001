"""The layouts of a proof that names none: every value of every key, every pair of strategies, 3D, 4D and 5D."""

from __future__ import annotations

from shoal.facts.layout import Layout
from shoal.facts.layout.legality import Case, broken
from shoal.plan.resolve import Job

# Two, four and eight ranks. A test checks that this list covers what the docstring says.
FULL = (
    # data parallelism: replicas; sharded states, gradients and parameters; both
    "dp=2",
    "dp=4",
    "dp=8",
    "dp=2,micro=2",
    "fsdp=2",
    "fsdp=2,zero=1",
    "fsdp=2,zero=2",
    "fsdp=2,zero=2,micro=1",
    "fsdp=4,unit=2",
    "fsdp=8,micro=1",
    "fsdp=2,micro=2,recompute=full",
    "fsdp=2,zero=1,recompute=selective",
    "dp=2,fsdp=2",
    "dp=2,fsdp=2,zero=1,micro=2",
    "dp=2,fsdp=2,zero=2,micro=1",
    "dp=2,fsdp=4,unit=4",
    "dp=2,recompute=full",
    # tensor and sequence
    "tp=2",
    "tp=2,sp=0",
    "tp=4,recompute=selective",
    "tp=8",
    "tp=8,sp=0,recompute=full",
    # context parallelism
    "cp=2",
    "cp=2,cp_kind=ulysses",
    "zero=1,cp=2,recompute=full",
    "zero=2,cp=2,cp_kind=ulysses,micro=2,recompute=selective",
    "cp=4",
    "cp=4,cp_kind=ulysses",
    "unit=2,cp=4,recompute=selective",
    "cp=8",
    # pipeline parallelism
    "pp=2,schedule=gpipe",
    "pp=2",
    "pp=2,schedule=interleaved",
    "pp=2,schedule=interleaved,chunks=4",
    "pp=2,schedule=zb",
    "pp=2,schedule=zb,chunks=2",
    "pp=2,schedule=zbv",
    "pp=2,schedule=dualpipev",
    "pp=4,recompute=selective",
    "pp=4,schedule=zbv",
    "pp=8,schedule=gpipe",
    # pairs
    "dp=2,tp=2",
    "dp=2,pp=2,schedule=zb",
    "dp=4,pp=2,schedule=dualpipev",
    "fsdp=2,tp=2",
    "fsdp=2,zero=1,tp=2,sp=0",
    "fsdp=2,zero=2,tp=4,micro=2",
    "fsdp=2,pp=2",
    "fsdp=2,zero=1,pp=2,schedule=interleaved",
    "fsdp=2,zero=2,pp=2,schedule=zb",
    "fsdp=2,pp=2,schedule=zbv",
    "fsdp=4,pp=2,schedule=gpipe,unit=2,recompute=full",
    "tp=2,pp=2",
    "tp=2,pp=2,schedule=zb,recompute=selective",
    "tp=2,pp=4,schedule=interleaved",
    "tp=4,pp=2,schedule=dualpipev",
    "dp=2,cp=2",
    "dp=2,cp=2,cp_kind=ulysses,micro=2",
    "fsdp=2,cp=2",
    "fsdp=2,zero=1,cp=2,cp_kind=ulysses",
    "fsdp=2,zero=2,cp=4,micro=1",
    "tp=2,cp=2",
    "tp=2,cp=2,cp_kind=ulysses",
    "tp=2,sp=0,cp=4",
    "cp=2,pp=2",
    "cp=2,cp_kind=ulysses,pp=2,schedule=zbv",
    "zero=1,cp=2,pp=4,schedule=gpipe",
    # offloaded activations
    "dp=2,recompute=full,offload=activations",
    "fsdp=2,recompute=selective,offload=activations:0.5",
    "tp=2,recompute=full,offload=activations",
    "cp=2,recompute=selective,offload=activations",
    "pp=2,recompute=full,offload=activations",
    "fsdp=2,tp=2,pp=2,schedule=zbv,recompute=full,offload=activations",
    # states in files
    "dp=2,offload=optimizer@nvme",
    "fsdp=2,micro=1,offload=optimizer@nvme",
    "fsdp=2,zero=2,offload=optimizer:0.5@nvme",
    "tp=2,recompute=full,offload=optimizer@nvme+activations@nvme",
    "dp=2,micro=1,offload=params@nvme",
    "fsdp=2,offload=params:0.5@nvme",
    "fsdp=2,zero=2,micro=1,offload=optimizer@nvme+params:0.5@nvme",
    "pp=2,offload=params@nvme",
    "fsdp=2,zero=1,micro=1,offload=optimizer+params@nvme",
    # offloaded weights
    "dp=2,offload=params",
    "fsdp=2,offload=params:0.5",
    "fsdp=2,zero=1,offload=params",
    "fsdp=2,zero=2,micro=1,recompute=full,offload=params:0.5",
    "tp=2,recompute=selective,offload=optimizer+params:0.5",
    "cp=2,offload=params",
    "pp=2,schedule=zb,offload=params",
    "fsdp=2,tp=2,pp=2,offload=params",
    # three axes at once
    "dp=2,fsdp=2,cp=2",
    "dp=2,tp=2,cp=2,cp_kind=ulysses",
    "dp=2,cp=2,pp=2,schedule=interleaved",
    "fsdp=2,tp=2,cp=2",
    "fsdp=2,cp=2,pp=2,recompute=full",
    "fsdp=2,zero=2,cp=2,cp_kind=ulysses,pp=2,schedule=zb",
    "tp=2,cp=2,pp=2",
    "tp=2,cp=2,cp_kind=ulysses,pp=2,schedule=zb",
    "dp=2,tp=2,pp=2",
    "dp=2,tp=2,pp=2,schedule=zbv,recompute=full",
    "dp=2,fsdp=2,tp=2",
    "dp=2,fsdp=2,pp=2,schedule=interleaved",
    "fsdp=2,tp=2,pp=2",
    "fsdp=2,zero=1,tp=2,pp=2,schedule=zbv,recompute=selective",
    "fsdp=2,zero=2,unit=2,tp=2,sp=0,pp=2,schedule=zb",
    "fsdp=2,tp=2,pp=2,schedule=dualpipev,recompute=full",
)

# For MoE models, at two, four and eight ranks: experts over replicas, over the ranks of one replica, over both, with
# each level of zero and every other axis. Models without experts do not allow them.
EXPERTS = (
    "dp=2,ep=2",
    "fsdp=2,ep=2",
    "fsdp=2,zero=1,ep=2,micro=2",
    "fsdp=2,zero=2,ep=2,recompute=full",
    "dp=4,ep=2",
    "dp=4,ep=4,recompute=selective",
    "fsdp=4,ep=2",
    "fsdp=4,zero=1,ep=2",
    "fsdp=4,zero=2,ep=2,micro=1",
    "dp=2,fsdp=2,ep=2,recompute=full",
    "dp=2,fsdp=2,ep=4,micro=1",
    "dp=2,fsdp=2,zero=1,ep=4",
    "dp=2,tp=2,ep=2",
    "dp=2,tp=2,sp=0,ep=2,recompute=full",
    "fsdp=2,tp=2,ep=2,recompute=selective",
    "dp=2,pp=2,ep=2",
    "fsdp=2,pp=2,ep=2,schedule=zb",
    "fsdp=2,zero=1,pp=2,ep=2,schedule=interleaved",
    "dp=8,ep=8",
    "dp=2,fsdp=4,unit=2,ep=4",
    "fsdp=4,zero=2,tp=2,ep=4",
    "fsdp=4,ep=2,pp=2,recompute=full",
    "dp=2,tp=2,pp=2,ep=2,schedule=zbv",
    "fsdp=2,tp=2,pp=2,ep=2,micro=1",
    "cp=2,ep=2",
    "fsdp=2,cp=2,cp_kind=ulysses,ep=2",
    "tp=2,cp=2,pp=2,ep=2",
    "fsdp=2,cp=2,pp=2,ep=4,recompute=full",
)

# Four and five axes at once, at eight and sixteen ranks: pipeline × data × tensor × context and, for MoE models,
# experts. The last ones are DeepSeek-V3's published layout (pp=16, ep=64, zero=1), a few ranks wide.
MANY_AXES = (
    "fsdp=2,tp=2,cp=2,pp=2",
    "fsdp=2,zero=1,tp=2,cp=2,cp_kind=ulysses,pp=2,schedule=interleaved",
    "fsdp=2,zero=2,tp=2,sp=0,cp=2,pp=2,schedule=zb,recompute=selective",
    "dp=2,tp=2,cp=2,pp=2,schedule=zbv,recompute=full",
    "dp=2,fsdp=2,tp=2,cp=2,cp_kind=ulysses",
    "dp=2,fsdp=2,tp=2,pp=2,schedule=dualpipev",
    "dp=2,fsdp=2,zero=1,cp=2,pp=2",
    "fsdp=2,zero=1,tp=2,pp=2,schedule=interleaved,ep=2",
    "tp=2,cp=2,cp_kind=ulysses,pp=2,ep=2,recompute=selective",
    "dp=2,cp=2,pp=2,schedule=zb,ep=4",
    "fsdp=2,tp=2,cp=2,ep=4",
    "fsdp=2,tp=2,cp=2,pp=2,ep=2",
    "fsdp=2,zero=1,tp=2,cp=2,pp=2,schedule=zbv,ep=4",
    "fsdp=2,zero=2,tp=2,sp=0,cp=2,cp_kind=ulysses,pp=2,ep=4,recompute=full",
    "dp=2,tp=2,cp=2,pp=2,ep=4,recompute=selective",
    "dp=2,fsdp=2,zero=1,pp=2,ep=4",
    "fsdp=4,zero=1,pp=2,schedule=dualpipev,ep=2",
    "fsdp=4,zero=1,pp=4,ep=4,micro=1",
)

# One of each, at two and four ranks: what a machine with a few cores proves in a minute or two.
QUICK = (
    "dp=2",
    "fsdp=2",
    "fsdp=2,zero=1",
    "fsdp=2,zero=2,micro=1",
    "tp=2",
    "tp=2,sp=0,recompute=selective",
    "cp=2",
    "cp=2,cp_kind=ulysses",
    "pp=2",
    "pp=2,schedule=zbv",
    "dp=2,fsdp=2,recompute=full",
    "fsdp=2,tp=2",
    "tp=2,pp=2,schedule=zb",
    "fsdp=2,pp=2,schedule=interleaved",
    "fsdp=2,recompute=selective,offload=activations",
    "dp=2,ep=2",
    "fsdp=2,tp=2,ep=2,recompute=full",
)

# Strict mode: the combinations it supports, at one, two, four and eight ranks.
STRICT = (
    "dp=1",
    "dp=2",
    "dp=4",
    "dp=8",
    "fsdp=2",
    "fsdp=2,zero=1",
    "fsdp=4,zero=2",
    "fsdp=8",
    "pp=2",
    "pp=2,schedule=zbv",
    "pp=4,schedule=zb",
    "pp=8",
    "dp=2,fsdp=2",
    "dp=2,pp=2,schedule=interleaved",
    "fsdp=2,pp=2",
    "fsdp=2,zero=1,pp=2,schedule=dualpipev",
    "dp=2,fsdp=2,pp=2,recompute=full",
    "fsdp=4,pp=2,schedule=gpipe,recompute=selective",
)


def legal(layouts: tuple[str, ...], job: Job) -> list[Layout]:
    """The layouts that the job's model, batch and cluster allow."""
    recipe = job.config.recipe
    parsed = [Layout.parse(text) for text in layouts]
    strict = job.config.run.strict
    cluster = None if job.config.cluster.share else job.cluster
    return [
        layout for layout in parsed if not any(broken(Case.of(layout, job.model, recipe, cluster, strict)))
    ]
