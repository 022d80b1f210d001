"""One rank of Shoal's side: its own program on a model and data of the peers' sizes, in the layout it is told."""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from peers import common
from peers.common import SIZES
from rich.console import Console
from safetensors.torch import save_file

from shoal.facts.config.file import load
from shoal.launch.local import prepared
from shoal.parallel.mesh import Mesh
from shoal.plan.resolve import Job, resolve
from shoal.train.data.loader import Batch, Loader
from shoal.train.files import read_rows
from shoal.train.loop import Training
from shoal.train.run_directory import RunDirectory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layout", help="without micro, as in fsdp=2,zero=1")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument(
        "--as-peers", action="store_true", help="the peers' first weights and rows, to compare losses"
    )
    options = parser.parse_args()
    rank, _ = common.join()
    with shared_directory(rank) as directory:
        if rank == 0:
            write_model(directory, options.tied)
            write_text(directory, options.steps)
        dist.barrier()
        job = describe(directory, options.layout, options.steps, options.as_peers)
        rows = train(job, rank, directory, options.as_peers)
        common.report([row["step_s"] for row in rows], [row["loss"] for row in rows], shoal=version("shoal"))
        dist.barrier()
    dist.destroy_process_group()


@contextmanager
def shared_directory(rank: int) -> Iterator[Path]:
    """Made and removed by the first rank."""
    with TemporaryDirectory() if rank == 0 else nullcontext() as made:
        name = [made]
        dist.broadcast_object_list(name)
        yield Path(str(name[0]))


def write_model(directory: Path, tied: bool) -> None:
    """The peers' model as a Hugging Face directory."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": SIZES.layers,
        "hidden_size": SIZES.hidden,
        "intermediate_size": SIZES.ffn,
        "num_attention_heads": SIZES.heads,
        "num_key_value_heads": SIZES.kv_heads,
        "head_dim": SIZES.head_dim,
        "vocab_size": SIZES.vocab,
        "max_position_embeddings": SIZES.seq,
        "rms_norm_eps": common.NORM_EPS,
        "rope_theta": common.ROPE_THETA,
        "initializer_range": common.INIT_STD,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
    }
    (directory / "config.json").write_text(json.dumps(config))
    weights = {
        name if name.startswith("lm_head") else f"model.{name}": parameter.detach()
        for name, parameter in common.build(tied).named_parameters()
    }
    save_file(weights, directory / "model.safetensors")


def write_text(directory: Path, steps: int) -> None:
    """As many random letters as the run reads, a line for each sequence of the batch."""
    letters = random.Random(common.SEED)
    with (directory / "text.jsonl").open("w") as file:
        for _ in range((steps + 1) * SIZES.batch):
            text = "".join(letters.choices(string.ascii_letters, k=SIZES.seq))
            file.write(json.dumps({"text": text}) + "\n")


def describe(directory: Path, layout: str, steps: int, as_peers: bool) -> Job:
    settings = {
        "model.init_from" if as_peers else "model.path": directory,
        "data.source": directory / "text.jsonl",
        "data.cache": directory / "cache",
        "data.heldout": 0,
        "data.workers": 1,
        "recipe.seq": SIZES.seq,
        "recipe.batch": SIZES.batch,
        "recipe.steps": steps,
        "recipe.lr": common.LR,
        "recipe.beta1": common.BETAS[0],
        "recipe.beta2": common.BETAS[1],
        "recipe.eps": common.EPS,
        "recipe.weight_decay": common.WEIGHT_DECAY,
        "recipe.schedule": "constant",
        "recipe.warmup": 0,
        "recipe.clip": common.CLIP,
        "evaluate.every": 0,
        "evaluate.batches": 0,
        "evaluate.samples": 0,
        "checkpoint.every": 0,
        "cluster.on": "2xcpu",
    }
    sets = [f"{name}={value}" for name, value in settings.items()]
    return resolve(load(None, sets, f"{layout},micro={SIZES.micro}").config)


def train(job: Job, rank: int, directory: Path, as_peers: bool) -> list[dict]:
    """The rows of metrics.jsonl, on every rank."""
    run = RunDirectory(directory / "run")
    if rank == 0:
        run.path.mkdir()
        run.write_start(job, {}, {})
        prepared(job.config.data, Console(stderr=True))
    dist.barrier()
    dataset = prepared(job.config.data, Console(stderr=True))  # found by the others
    training = Training(job, run, dataset, Mesh(job.layout, rank, torch.device("cpu")))
    if as_peers:
        recipe = job.config.recipe
        training.loader = PeersRows(training.loader.samples, recipe.seed, recipe.batch)
    training.run_to_end(bool)
    dist.barrier()
    return read_rows(run.metrics)


class PeersRows(Loader):
    """The rows that the peers train on."""

    def steps(
        self, first: int, last: int, position_groups: Sequence[Sequence[int]]
    ) -> Generator[tuple[int, list[Batch]]]:
        for step in range(first, last + 1):
            yield step, [self.rows(step, positions) for positions in position_groups]

    def rows(self, step: int, positions: Sequence[int]) -> Batch:
        tokens, targets = common.rows(step, range(positions[0], positions[-1] + 1))
        return Batch(
            tokens=tokens,
            targets=targets,
            positions=torch.arange(SIZES.seq).repeat(len(tokens), 1),
            documents=None,
            rows=torch.tensor(list(positions)),
            count=targets.numel(),
        )


if __name__ == "__main__":
    main()
