"""Steps of LoRA and QLoRA beside transformers with PEFT, in turns on this machine's device: rates and peaks.

python benchmarks/adapters.py llama3-8b --micro 2 --sides "lora;peft"
python benchmarks/adapters.py llama3-8b --micro 2 --recompute full --sides "lora;qlora;peft"
python benchmarks/adapters.py tiny --seq 64 --layers 2 --eager --precision fp32   # anywhere

All sides begin with the same weights, a hash of names, take the same rows and make the same updates: their losses agree
as far as the precision goes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from record import record

from shoal.facts.cluster.notation import find
from shoal.facts.config import Config
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.model.presets import PRESETS
from shoal.facts.targets import IGNORE
from shoal.models.initial import fill, whole
from shoal.parallel.mesh import Mesh
from shoal.plan.resolve import Job
from shoal.predict.memory import ledger
from shoal.predict.time.step import step as predicted_step
from shoal.train.data.loader import Batch
from shoal.train.first_weights import first_weights
from shoal.train.program import BACKEND, assemble, blueprint

WARM_UP = 3
RANK, ALPHA = 16, 32.0
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CLIP = 1.0
UPDATES = {"lr": 1e-4, "schedule": "constant", "warmup": 0, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--sides", default="lora;peft", help="of lora, qlora, peft")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--cap-gib", type=float, help="of the device's memory, no more than this")
    parser.add_argument("--side", help="only this one, in this process: prints a row as JSON")
    options = parser.parse_args()
    if options.side:
        if ON_GPU and options.cap_gib:
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(options.cap_gib * 2**30 / whole)
        print(json.dumps(SIDES[options.side](options)))
        return
    for number in range(options.rounds):
        for side in options.sides.split(";"):
            # A process for each: what another leaves on the device would be in its peak.
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
            said = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            asked = {
                "model": options.model,
                "layers": options.layers,
                "micro": options.micro,
                "seq": options.seq,
                "recompute": options.recompute,
                "precision": options.precision,
                "cap_gib": options.cap_gib,
                "round": number,
            }
            found = json.loads(said.stdout.splitlines()[-1]) if said.returncode == 0 else {"failed": True}
            record("adapters", side=side, **asked, compiled=not options.eager, **found)


def _model(options: argparse.Namespace) -> Model:
    model = PRESETS[options.model]
    return model.model_copy(update={"layers": options.layers}) if options.layers else model


def _tokens(options: argparse.Namespace, model: Model) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(0, model.vocab, (options.micro, options.seq)).to(DEVICE)


def _rate(options: argparse.Namespace, issue: Callable[[int], Callable[[], float]]) -> dict[str, Any]:
    """Of steps that are issued before the last one's loss is read, as training does."""
    began = time.perf_counter()
    ends, before, losses = [], None, []
    for number in range(1, WARM_UP + options.steps + 2):
        if ON_GPU and number == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        read, before = before, issue(number)
        if read is not None:
            losses.append(read())
        ends.append(time.perf_counter())
        print(f"step {number}: {ends[-1] - began:.1f} s", file=sys.stderr, flush=True)
    taken = [after - one for one, after in zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False)]
    seconds = statistics.median(taken)
    return {
        "step_s": seconds,
        "tokens_per_s": options.micro * options.seq / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if ON_GPU else None,
        "losses": losses,
    }


def shoal(options: argparse.Namespace, base: str) -> dict[str, Any]:
    model = _model(options)
    layout = Layout.parse(f"micro={options.micro},recompute={options.recompute}")
    compiled = ON_GPU and not options.eager
    config = Config.model_validate(
        {
            "recipe": {
                "seq": options.seq, "batch": options.micro, "steps": 100,
                "precision": options.precision, "clip": CLIP, **UPDATES,
            },
            "model": {"lora": {"rank": RANK, "alpha": ALPHA, "targets": TARGETS, "base": base}},
            "compile": {"enabled": compiled},
        }
    )  # fmt: skip
    job = Job(config, model, find("local"), layout)
    recipe = config.recipe
    step = assemble(
        blueprint(job.network, recipe), recipe, config.tune, Mesh(layout, 0, DEVICE), first_weights(job),
        compile_with=BACKEND if compiled else None,
    )  # fmt: skip
    print("assembled", file=sys.stderr, flush=True)
    tokens = _tokens(options, model)
    positions = torch.arange(options.seq, device=DEVICE).expand_as(tokens).contiguous()
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORE  # as transformers shifts labels
    count = tokens.numel() - options.micro
    batch = Batch(tokens, targets, positions, None, torch.arange(options.micro, device=DEVICE), count)

    def issue(number: int) -> Callable[[], float]:
        issued = step.issue(number, [batch], count)
        return lambda: issued.read().loss

    found = _rate(options, issue)
    if compiled and step.placed.compiled.problem:
        found["not_compiled"] = step.placed.compiled.problem
    workload = job.workload()
    expected = ledger(workload)
    found["predicted_peak_bytes"] = expected.peak_allocated
    found["predicted_step_s"] = predicted_step(workload).seconds
    return found


def peft(options: argparse.Namespace) -> dict[str, Any]:
    """An 8B Llama of transformers in bf16 with PEFT's adapters in fp32, layers compiled, one fused AdamW."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    model = _model(options)
    config = LlamaConfig(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=max(8192, options.seq),
        use_cache=False,
        rms_norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        tie_word_embeddings=model.tied,
        attn_implementation="sdpa",
    )
    torch.set_default_dtype(getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[options.precision]))
    with DEVICE:
        network = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    network.train()
    if options.recompute != "none":
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        network.enable_input_require_grads()
    adapters = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(network, adapters)
    _hashed(adapted, model)
    if ON_GPU and not options.eager:
        for layer in adapted.base_model.model.model.layers:
            layer.compile(dynamic=False)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=UPDATES["lr"],
        betas=(UPDATES["beta1"], UPDATES["beta2"]),
        weight_decay=UPDATES["weight_decay"],
        fused=True,
    )
    tokens = _tokens(options, model)

    def issue(number: int) -> Callable[[], float]:
        loss = adapted(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return lambda: float(loss.detach())

    versions = {"transformers": version("transformers"), "peft": version("peft")}
    return {**_rate(options, issue), **versions}


@torch.no_grad()
def _hashed(adapted: torch.nn.Module, model: Model) -> None:
    """Give PEFT's model the weights that Shoal begins with: transformers' own grow the residual stream otherwise."""
    for name, parameter in adapted.named_parameters():
        ours = name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".default.", ".")
        drawn = torch.empty_like(parameter, dtype=torch.float32)
        fill([(ours, whole(ours, drawn))], model, seed=0)
        parameter.copy_(drawn)


SIDES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "lora": lambda options: shoal(options, "bf16"),
    "qlora": lambda options: shoal(options, "nf4"),
    "peft": peft,
}


if __name__ == "__main__":
    main()
