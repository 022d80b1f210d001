"""Preference data: every spelling of a pair, the loss on what differs, both of a pair always together."""

import json

import numpy as np
import pytest

from shoal.facts.config.file import load
from shoal.facts.problem import BadInput
from shoal.facts.targets import IGNORE
from shoal.train.data.collection import Collection
from shoal.train.data.conversations import read_preference
from shoal.train.data.dataset import Dataset
from shoal.train.data.input import open_loader
from shoal.train.data.prepare import prepare
from shoal.train.data.row_format import RowFormat
from shoal.train.data.samples import PairSamples
from shoal.train.data.templates import ChatTemplate
from shoal.train.data.tokenizers import open_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}.{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORMAT = RowFormat(format="preference", template=ChatTemplate(TEMPLATE), answers_only=True)


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


PROMPT = "what swims?"
SPELLINGS = {
    "texts": {"prompt": PROMPT, "chosen": "fish", "rejected": "stones"},
    "messages": {"prompt": [user(PROMPT)], "chosen": [answer("fish")], "rejected": [answer("stones")]},
    "whole conversations": {
        "chosen": [user(PROMPT), answer("fish")],
        "rejected": [user(PROMPT), answer("stones")],
    },
    "whole, with the prompt as well": {
        "prompt": PROMPT,
        "chosen": [user(PROMPT), answer("fish")],
        "rejected": [user(PROMPT), answer("stones")],
    },
    "a prompt of messages and texts": {"prompt": [user(PROMPT)], "chosen": "fish", "rejected": "stones"},
    "ShareGPT": {
        "chosen": [{"from": "human", "value": PROMPT}, {"from": "gpt", "value": "fish"}],
        "rejected": [{"from": "human", "value": PROMPT}, {"from": "gpt", "value": "stones"}],
    },
}


@pytest.mark.parametrize("row", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_is_the_same_pair(row):
    chosen, rejected = FORMAT.documents(row)
    assert chosen.text == f"<user>{PROMPT}<assistant>fish."
    assert rejected.text == f"<user>{PROMPT}<assistant>stones."
    for document, learned in ((chosen, "fish."), (rejected, "stones.")):
        assert [document.text[start:stop] for start, stop in document.answers] == [learned]


def test_answers_that_both_have_are_part_of_what_is_asked():
    before = [{"role": "system", "content": "be brief"}, user("hello"), answer("hi"), user(PROMPT)]
    pair = FORMAT.documents(
        {
            "chosen": [*before, answer("fish"), user("and?"), answer("whales")],
            "rejected": [*before, answer("no")],
        }
    )
    spans = [[one.text[start:stop] for start, stop in one.answers] for one in pair]
    assert spans == [["fish.", "whales."], ["no."]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "rejected": "b"}, "no 'chosen'"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "no 'rejected'"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "'chosen': no answer"),
        ({"prompt": "a", "chosen": "b", "rejected": [user("c")]}, "'rejected': no answer"),
        ({"prompt": "a", "chosen": "b", "rejected": [answer(" ")]}, "'rejected': no answer"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "'rejected' is not a list of messages"),
        ({"chosen": "b", "rejected": "c"}, "'chosen' is a text, and there is no prompt"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "'prompt' is not a list of messages"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        (
            {"chosen": [user("a"), answer("b")], "rejected": [user("c"), answer("d")]},
            "chosen and rejected differ before the answer",
        ),
        (
            {
                "chosen": [user("a"), answer("b")],
                "rejected": [user("a"), answer("b"), user("c"), answer("d")],
            },
            "chosen and rejected differ before the answer",
        ),
    ],
)
def test_what_is_no_pair_says_why(row, reason):
    assert read_preference(row) == reason == FORMAT.documents(row)


def test_a_template_that_makes_one_of_two_is_found_out():
    deaf = RowFormat(
        format="preference",
        template=ChatTemplate("{% for m in messages %}{{ m.content | lower }}{% endfor %}"),
        answers_only=True,
    )
    row = {"prompt": "a", "chosen": "B", "rejected": "b"}
    assert deaf.documents(row) == "chosen and rejected are the same"


def prepared(tmp_path, rows=60, **options):
    source = tmp_path / "pairs.jsonl"
    lines = [
        {"prompt": f"{n:03d}?", "chosen": f"c{n:03d}", "rejected": "r" * (1 + n % 5)} for n in range(rows)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {
        "format": "preference",
        "template": "none",
        "cache": tmp_path / "cache",
        "heldout": 0.2,
    } | options
    return prepare(str(source), **given)


def text_of(sample):
    """A sample's text, and of it what is learned."""
    decode = open_tokenizer("bytes").decode
    last = np.flatnonzero(sample.targets != IGNORE)[-1]
    tokens = [*sample.tokens[: last + 1], sample.targets[last]]
    learned = sample.targets[sample.targets != IGNORE]
    return decode(tokens[:-1]), decode(learned[:-1])


@pytest.mark.parametrize("rows", [60, 7])
def test_both_of_a_pair_are_trained_on_or_held_out(tmp_path, rows):
    """By the hash of many rows, and by the last ones of a few."""
    dataset = Dataset.open(prepared(tmp_path, rows))
    assert dataset.pairs and dataset.manifest["rows"] == rows
    seen = set()
    for stream in (dataset.train, dataset.heldout):
        samples = PairSamples(stream, 16, pad=256, most_left_out=0)
        assert len(samples) == len(stream.document_ends) > 0
        for number in range(0, len(samples), 2):
            (chosen, learned), (rejected, _) = (text_of(samples[number + side]) for side in (0, 1))
            assert chosen[:4] == rejected[:4] and learned == "c" + chosen[:3] and rejected[4] == "r"
            seen.add(chosen[:3])
            assert bytes(samples.prompt(number // 2, 8).astype(np.uint8)).decode() == chosen[:4]
    assert len(seen) == rows


def test_pairs_that_are_too_long_are_few_or_refused(tmp_path):
    stream = Dataset.open(prepared(tmp_path, heldout=0.0)).train
    # 12 of 60 rejected answers have 5 letters: with prompt and end 10 tokens, which a row of 9 just takes.
    assert PairSamples(stream, 9, pad=256, most_left_out=0).left_out == 0
    some = PairSamples(stream, 8, pad=256, most_left_out=0.2)
    assert (some.left_out, len(some)) == (12, 2 * 48)
    assert all(not text_of(some[number])[0].endswith("rrrrr") for number in range(len(some)))
    with pytest.raises(
        BadInput, match=r"12 of the 60 pairs are longer than recipe.seq = 8, at most 0"
    ) as refused:
        PairSamples(stream, 8, pad=256, most_left_out=0)
    assert refused.value.problems[0].fix.startswith("recipe.seq = 9,")


@pytest.mark.parametrize("shuffle", ["global", "window"])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_order_keeps_pairs_together_and_is_a_function_of_seed_and_step(tmp_path, shuffle, mixed):
    source = tmp_path / "pairs.jsonl"
    path = prepared(tmp_path, heldout=0.0)
    options = [
        f"data.shuffle={shuffle}",
        "recipe.loss=dpo",
        "recipe.batch=8",
        "recipe.seq=16",
        "recipe.steps=40",
    ]
    options += ["data.format=preference", "data.template=none", "data.heldout=0"]
    options += (
        [f'data.mix=[{{source="{source}"}}, {{source="{source}"}}]'] if mixed else [f"data.source={source}"]
    )
    config = load(None, options).config
    data = Collection.open(path)
    if mixed:
        data = Collection(path, (data.parts[0], data.parts[0]), [[1.0, []], [1.0, []]])
    loader = open_loader(config, data, open_tokenizer("bytes"))
    epoch = []
    for step in range(1, len(loader.samples) // 8 + 1):
        used = loader.used(step)
        assert all(
            one % 2 == 0 and other == one + 1 for one, other in zip(used[::2], used[1::2], strict=True)
        )
        batch = loader.rows(step, range(2, 6))
        assert batch.samples == tuple(used[2:6]) and batch.count == 2
        assert batch.reference is not None and batch.reference.isnan().all()
        epoch += used
    assert sorted(epoch) == list(range(len(loader.samples)))
    assert sorted(epoch) != epoch
