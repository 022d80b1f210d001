"""Generate text from a run, a checkpoint or a model directory: in this process, or in ranks of a layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.facts.config import Config
from shoal.facts.input.untrusted_files import read_json
from shoal.facts.layout import Layout
from shoal.facts.layout.sequence import length_unit
from shoal.facts.model import hub
from shoal.facts.problem import BadInput
from shoal.launch import local
from shoal.plan.resolve import Job, resolve
from shoal.train.checkpoint.listing import newest_sound, run_of
from shoal.train.data.tokenizers import Tokenizer, open_tokenizer
from shoal.train.huggingface.side_files import GENERATION, Origin, more_ends, origin_of

if TYPE_CHECKING:
    from shoal.parallel.signed_store import SignedStore
    from shoal.train.write_text import TextRequest


@dataclass(frozen=True)
class TextSource:
    """Where weights and tokenizer come from."""

    weights: str
    origin: Origin


def find_source(text: str) -> TextSource:
    """A run (its newest intact checkpoint), a checkpoint, a model directory, or one on the Hub."""
    path = hub.fetch(text, hub.WEIGHTS, newest=False) if hub.is_hub_name(text) else Path(text).expanduser()
    if (path / "config.json").is_file():
        return TextSource(str(path), Origin(str(path), None, None, (path,)))
    found = newest_sound(path)
    assert found.manifest is not None
    return TextSource(str(path), origin_of(found.manifest, run_of(path)))


def job_for(
    source: TextSource,
    layout: str,
    precision: str | None,
    tokens: int,
    visible: str | None,
    average: bool = False,
) -> Job:
    """Build the job; raises if anything is wrong with the layout or the weights."""
    from shoal.train.first_weights import weights_of

    parsed = Layout.parse(layout)
    unit = math.lcm(length_unit(parsed), 1)
    # A batch that every layout can run without accumulation: a row for every data rank and stage.
    batch = parsed.data_ranks * max(2 * parsed.pp, 1)
    recipe: dict[str, object] = {"seq": tokens + -tokens % unit, "batch": batch}
    values = {
        "layout": layout,
        "model": {"path": source.weights, "init_from": source.weights},
        "recipe": recipe,
        "compile": {"enabled": False},
    }
    job = resolve(Config.model_validate(values), visible, trains=False)
    on_gpu = job.cluster.device.name != "cpu"
    recipe["precision"] = precision or ("bf16" if on_gpu else "fp32")
    recipe["states"] = "bf16" if recipe["precision"] == "bf16" else "fp32"
    job = resolve(Config.model_validate(values), visible, trains=False)
    local.check_devices(job, visible)
    weights_of(source.weights, job.model, average)  # refuses what does not fit
    return without_offload(job)


def without_offload(job: Job) -> Job:
    """Drop offload: without updates and backward passes there is nothing to offload."""
    return replace(job, layout=job.layout.model_copy(update={"offload": ()}))


def tokenizer_of(source: TextSource, job: Job) -> Tokenizer:
    tokenizer = open_tokenizer(source.origin.tokenizer, source.origin.end_token)
    if tokenizer.vocab > job.model.vocab:
        raise BadInput(
            f"tokenizer {source.origin.tokenizer} has {tokenizer.vocab} tokens, {job.model.name} rows for "
            f"{job.model.vocab}",
            "--tokenizer: the one that the model was trained with",
        )
    return tokenizer


def prompt_tokens(source: TextSource, tokenizer: Tokenizer, text: str, chat: bool) -> list[int]:
    """A run continues text as it was trained; a model directory's tokenizer may prepend a token.

    A chat template already has that token in its text.
    """
    path = Path(source.weights) / "tokenizer.json"
    if chat or source.origin.tokenizer != source.weights or not path.is_file():
        return [int(one) for one in tokenizer.encode_batch([text])[0]]
    from tokenizers import Tokenizer as Reader

    reader = Reader.from_file(str(path))
    reader.no_truncation()
    reader.no_padding()
    found: list[int] = reader.encode(text).ids
    return found


def ends_of(source: TextSource, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end a text: the run's, and those of the generation config, which may be several."""
    ends = more_ends(source.origin, tokenizer)
    for folder in source.origin.models:
        try:
            said = read_json(folder / GENERATION)["eos_token_id"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        ends += [one for one in (said if isinstance(said, list) else [said]) if isinstance(one, int)]
    return tuple(dict.fromkeys(ends))


def chat_prompt(origin: Origin, messages: list[dict[str, str]]) -> str:
    """Render a conversation with its model's template, up to where the answer begins."""
    path = Path(origin.tokenizer).expanduser()
    folder = path if path.is_dir() else path.parent
    if origin.tokenizer == "bytes" and origin.template is None:
        raise BadInput('the tokenizer "bytes" has no chat template', "leave out --chat")
    try:
        import transformers
    except ImportError:
        raise BadInput(
            "--chat needs the transformers package", "pip install -e '.[hf]' in Shoal's checkout"
        ) from None
    try:
        template = origin.template.read_text(encoding="utf-8") if origin.template is not None else None
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # Jinja's errors, a missing template, or damaged files
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(
            f"--chat: {folder} has no chat template that takes this: {reason}", "leave out --chat"
        ) from None
    return str(text)


def write(
    job: Job, request: TextRequest, visible: str | None, told: Callable[[list[int]], None]
) -> list[int]:
    """The generated tokens. ``told`` gets them as they come in a single process, and at the end with several."""
    from shoal.launch.init_rank import init_rank
    from shoal.train.write_text import write_text

    if job.layout.world == 1:
        return write_text(job, init_rank(job, 0, 0, None), request, told)
    from shoal.launch.ranks import run_ranks

    local.warm_workers((*local.PRELOAD, "shoal.launch.generate"), job.config)
    written: list[int] = run_ranks(job.layout.world, _rank, (job, request))[0]
    return written


def _rank(rank: int, world: int, store: SignedStore, job: Job, request: TextRequest) -> list[int]:
    from shoal.launch.init_rank import init_rank
    from shoal.train.write_text import write_text

    return write_text(job, init_rank(job, rank, rank, store), request)
