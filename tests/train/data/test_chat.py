"""Chat and instruction data: the template's own text, the loss on answers alone, one end token."""

import json

import numpy as np
import pytest
import tokenizers as hf
import torch
from tests.train.conftest import network_of
from transformers import PreTrainedTokenizerFast

from shoal.facts.problem import BadInput
from shoal.facts.targets import IGNORE
from shoal.train.data.dataset import Dataset
from shoal.train.data.prepare import prepare
from shoal.train.data.samples import Samples
from shoal.train.data.templates import ChatTemplate, Unrendered
from shoal.train.data.tokenizers import open_tokenizer
from shoal.train.files import read_rows

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The answer follows at once, and there is no prompt for one.
LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content | trim }} "
    "[/INST]{% elif message.role == 'assistant' %} {{ message.content | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
# Thoughts of the last answer are kept, those of answers before it are not, and the prompt opens a thought.
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<a>{% generation %}{{ message.content }}!"
    "{% endgeneration %}</a>{% else %}<u>{{ message.content }}</u>{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TALK = [
    {"role": "user", "content": "what is a shoal"},
    {"role": "assistant", "content": "many fish as one"},
    {"role": "user", "content": "and a fish"},
    {"role": "assistant", "content": "fish"},
]


def answers(source, messages=TALK, **tokens):
    text, spans = ChatTemplate(source, tuple(tokens.items())).render(messages)
    return text, [text[start:stop] for start, stop in spans]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (CHATML, ["many fish as one<|im_end|>", "fish<|im_end|>"]),
        (LLAMA2, ["many fish as one</s>", "fish</s>"]),
        (THINKING, ["many fish as one<|im_end|>", "\n</think>\n\nfish<|im_end|>"]),
        (MARKED, ["many fish as one!", "fish!"]),
        (PLAIN, ["many fish as one\n", "fish\n"]),
    ],
    ids=["chatml", "llama2", "thinking", "marked", "plain"],
)
def test_answers_are_found_in_what_a_template_renders(source, found):
    assert answers(source, bos_token="<s>", eos_token="</s>")[1] == found


def test_an_answer_that_repeats_the_question_is_not_looked_for_in_it():
    talk = [{"role": "user", "content": "fish fish"}, {"role": "assistant", "content": "fish"}]
    for source in (CHATML, LLAMA2, PLAIN):
        text, spans = ChatTemplate(source, (("bos_token", ""), ("eos_token", "</s>"))).render(talk)
        ((start, _),) = spans
        assert text[:start].count("fish") == 2, text


def test_what_a_template_refuses_is_said_in_its_words():
    with pytest.raises(Unrendered, match="no such role"):
        ChatTemplate(LLAMA2).render([{"role": "robot", "content": "x"}, TALK[1]])


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    """A directory as a chat model has one, trained on a few words."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=250,  # fits the small model
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(set("abcdefghijklmnopqrstuvwxyz<>!:ĊĠ/")),
    )
    tokenizer.train_from_iterator(["what is a shoal many fish as one user assistant \n"] * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML})
    )
    return directory


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def opened(source, tmp_path, tokenizer, **options):
    options = {"format": "chat", "heldout": 0, "max_bad_rows": 0, **options}
    return Dataset.open(
        prepare(source, tokenizer=str(tokenizer), cache=tmp_path / "cache", workers=1, **options), verify=True
    )


def test_tokens_are_those_of_transformers_and_no_end_is_doubled(tmp_path, chat_tokenizer):
    source = write(tmp_path / "a.jsonl", [{"messages": TALK}, {"messages": TALK[2:]}])
    stream = opened(source, tmp_path, chat_tokenizer).train
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(chat_tokenizer / "tokenizer.json"), chat_template=CHATML, eos_token="<|im_end|>"
    )
    wanted = [theirs.apply_chat_template(talk, return_dict=False) for talk in (TALK, TALK[2:])]
    assert stream.read(0, len(stream)).tolist() == [token for talk in wanted for token in talk]
    assert stream.document_ends.tolist() == [len(wanted[0]), len(wanted[0]) + len(wanted[1])]
    mine = open_tokenizer(str(chat_tokenizer))
    learned = stream.learned(0, len(wanted[0]))
    assert mine.decode(np.array(wanted[0])[learned]) == "many fish as one<|im_end|>fish<|im_end|>"


def test_transformers_marks_the_same_tokens_where_a_template_marks_them(tmp_path, chat_tokenizer):
    marked = tmp_path / "marked.jinja"
    marked.write_text(MARKED)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(chat_tokenizer / "tokenizer.json"), chat_template=MARKED, eos_token="<|im_end|>"
    )
    wanted = theirs.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    source = write(tmp_path / "a.jsonl", [{"messages": TALK}])
    stream = opened(source, tmp_path, chat_tokenizer, template=str(marked)).train
    length = len(wanted["input_ids"])
    assert stream.read(0, length).tolist() == wanted["input_ids"]
    assert stream.learned(0, length).tolist() == [bool(one) for one in wanted["assistant_masks"]]
    # This template ends a talk with plain text, so it gets an end.
    assert stream.read(length, len(stream)).tolist() == [theirs.eos_token_id]


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("chat", {"messages": TALK[:2]}),
        (
            "chat",
            {
                "conversations": [
                    {"from": "human", "value": "what is a shoal"},
                    {"from": "gpt", "value": "many fish as one"},
                ]
            },
        ),
        ("prompt", {"prompt": "what is a shoal", "completion": "many fish as one"}),
        ("prompt", {"instruction": "what is a shoal", "input": "", "output": "many fish as one"}),
        ("prompt", {"question": "what is a shoal", "answer": "many fish as one"}),
        ("prompt", {"prompt": TALK[:1], "completion": TALK[1:2]}),
    ],
    ids=["messages", "sharegpt", "completion", "alpaca", "question", "lists"],
)
def test_every_spelling_of_a_talk_gives_the_same_tokens(tmp_path, chat_tokenizer, format, row):
    plain = opened(write(tmp_path / "a.jsonl", [{"messages": TALK[:2]}]), tmp_path, chat_tokenizer)
    other = opened(write(tmp_path / "b.jsonl", [row]), tmp_path, chat_tokenizer, format=format)
    assert other.fingerprint == plain.fingerprint


TOOLS = [{"type": "function", "function": {"name": "fish", "parameters": {}}}]
CALLING = (
    "{% if tools %}{% for tool in tools %}<{{ tool.function.name }}>{% endfor %}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if 'tool_calls' in message %}{{ message.tool_calls[0].function.arguments | tojson }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def called(name, value, **more):
    """A conversation in which a tool is called, as OpenAI's API has it; the content of a call may not be there."""
    call = {"id": "1", "type": "function", "function": {"name": "fish", "arguments": {name: value}}}
    return [
        TALK[0],
        {"role": "assistant", **more, "tool_calls": [call]},
        {"role": "tool", "content": "fish"},
        TALK[1],
    ]


def same(tmp_path, tokenizer, one, other):
    """Two rows give the same tokens, and mark the same ones."""
    template = tmp_path / "calling.jinja"
    template.write_text(CALLING)
    pair = [
        opened(write(tmp_path / f"{name}.jsonl", [row]), tmp_path, tokenizer, template=str(template))
        for name, row in (("one", one), ("other", other))
    ]
    return pair[0].fingerprint == pair[1].fingerprint


@pytest.mark.parametrize(
    "other",
    [
        {"messages": called("a", "shoal"), "tools": json.dumps(TOOLS)},
        {"messages": called("a", "shoal", content=None, function_call=None, refusal=None), "tools": TOOLS},
        {"messages": [{"tool_calls": None, **one} for one in called("a", "shoal")], "tools": TOOLS},
    ],
    ids=["tools as a text", "content null", "fields null"],
)
def test_tools_and_calls_of_them_as_they_are_about(tmp_path, chat_tokenizer, other):
    assert same(tmp_path, chat_tokenizer, {"messages": called("a", "shoal"), "tools": TOOLS}, other)


def test_tools_that_are_no_json_are_a_bad_row(tmp_path, chat_tokenizer):
    source = write(tmp_path / "a.jsonl", [{"messages": TALK, "tools": "fish("}])
    with pytest.raises(BadInput, match="'tools' is not JSON"):
        opened(source, tmp_path, chat_tokenizer)


def test_a_table_of_calls_is_read_as_its_rows(tmp_path, chat_tokenizer):
    """A column of a table gives each call the arguments of all, and each message a field for calls."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": called("a", "shoal")}, {"messages": called("is", "many")}, {"messages": TALK}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    template = tmp_path / "calling.jinja"
    template.write_text(CALLING)
    found = [
        opened(source, tmp_path, chat_tokenizer, template=str(template)).fingerprint
        for source in (write(tmp_path / "a.jsonl", rows), str(tmp_path / "a.parquet"))
    ]
    assert found[0] == found[1]


def test_a_system_message_beside_the_conversation(tmp_path, chat_tokenizer):
    one = {"messages": [{"role": "system", "content": "many fish"}, *TALK]}
    assert same(tmp_path, chat_tokenizer, one, {"messages": TALK, "system": "many fish"})
    assert same(tmp_path, chat_tokenizer, one, {**one, "system": "what"})  # it has one


@pytest.mark.parametrize("off", [{"weight": 0}, {"train": False}])
def test_answers_without_weight_are_read_and_not_learned(tmp_path, chat_tokenizer, off):
    talk = [TALK[0], TALK[1] | off, TALK[2], TALK[3] | {"weight": 1, "train": True}]
    stream = opened(write(tmp_path / "a.jsonl", [{"messages": talk}]), tmp_path, chat_tokenizer).train
    plain = opened(write(tmp_path / "b.jsonl", [{"messages": TALK}]), tmp_path, chat_tokenizer).train
    everything = stream.read(0, len(stream))
    assert everything.tolist() == plain.read(0, len(plain)).tolist()
    mine = open_tokenizer(str(chat_tokenizer))
    assert mine.decode(everything[stream.learned(0, len(stream))]) == "fish<|im_end|>"
    with pytest.raises(BadInput, match="no answer"):
        opened(write(tmp_path / "c.jsonl", [{"messages": talk[:2]}]), tmp_path, chat_tokenizer)


def test_the_loss_can_be_on_all_of_it(tmp_path, chat_tokenizer):
    source = write(tmp_path / "a.jsonl", [{"messages": TALK}])
    stream = opened(source, tmp_path, chat_tokenizer, loss_on="all").train
    assert not stream.has_answers and stream.learned(0, len(stream)).all()


def test_prompts_without_a_template_are_texts_as_they_are(tmp_path):
    source = write(tmp_path / "a.jsonl", [{"prompt": "2+2=", "completion": "4"}])
    stream = opened(source, tmp_path, "bytes", format="prompt", template="none").train
    assert stream.read(0, len(stream)).tolist() == [*b"2+2=4", 256]
    assert stream.learned(0, len(stream)).tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("packing", [True, False])
def test_targets_are_the_answers_wherever_samples_are_cut(tmp_path, chat_tokenizer, packing):
    source = write(tmp_path / "a.jsonl", [{"messages": TALK}, {"messages": TALK[:2]}, {"messages": TALK[2:]}])
    stream = opened(source, tmp_path, chat_tokenizer).train
    everything, learned = stream.read(0, len(stream)), stream.learned(0, len(stream))
    for seq in (7, 20, 33, 200):
        found = []
        samples = Samples(stream, seq, packing=packing, within_documents=seq % 2 == 0, pad=1)
        for number in range(len(samples)):
            found += [one for one in samples[number].targets.tolist() if one != IGNORE]
        assert found == everything[learned].tolist(), seq


def test_packed_conversations_stay_whole(tmp_path, chat_tokenizer):
    source = write(tmp_path / "a.jsonl", list(talks(40)))
    stream = opened(source, tmp_path, chat_tokenizer).train
    ends = stream.document_ends.tolist()
    seq = 3 * max(np.diff(ends, prepend=0))
    samples = Samples(stream, seq, packing=True, within_documents=True, pad=-1)
    start = 0
    for number in range(len(samples)):
        sample = samples[number]
        text = stream.read(start, min(start + seq, len(stream)))
        used = int((sample.tokens >= 0).sum())
        assert sample.tokens[:used].tolist() == text[:used].tolist()
        # The next sample begins where a conversation does, and where this one had no room for it.
        stop = start + used + 1
        assert stop in ends
        following = ends[ends.index(stop) + 1] if stop < len(stream) else stop + seq
        assert following - start > seq + 1
        start = stop
    assert start == len(stream) and len(samples) < 40


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([{"messages": TALK[:1]}], {}, "no answer"),
        ([{"messages": [TALK[0], {"role": "assistant", "content": " "}]}], {}, "no answer"),
        ([{"messages": "hello"}], {}, "not a list of messages"),
        ([{"messages": [{"content": "x"}]}], {}, "lacks its role"),
        ([{"prompt": "x"}], {"format": "prompt"}, "no answer"),
        ([{"messages": TALK}], {"format": "text"}, 'data.format = "chat" reads such rows'),
        ([{"messages": TALK}], {"format": "prompt"}, 'data.format = "chat" reads such rows'),
        ([{"instruction": "x", "output": "y"}], {}, 'data.format = "prompt" reads such rows'),
        ([{"messages": TALK}], {"tokenizer": "bytes"}, 'the tokenizer "bytes" has no chat template'),
        ([{"messages": TALK}], {"template": "none"}, "tell the roles apart"),
        ([{"messages": TALK}], {"template": "/nowhere.jinja"}, "cannot read data.template"),
        ([{"text": "x"}], {"format": "text", "loss_on": "answers"}, "a text has no answers"),
    ],
)
def test_what_has_no_answer_or_no_template_is_refused(tmp_path, chat_tokenizer, rows, options, words):
    source = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(BadInput, match=words):
        opened(source, tmp_path, options.pop("tokenizer", chat_tokenizer), **options)


def test_a_tokenizer_without_a_template_is_told_apart(tmp_path, chat_tokenizer):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_bytes((chat_tokenizer / "tokenizer.json").read_bytes())
    with pytest.raises(BadInput, match="has no chat template"):
        opened(write(tmp_path / "a.jsonl", [{"messages": TALK}]), tmp_path, bare)
    (bare / "chat_template.jinja").write_text("{% for")
    with pytest.raises(BadInput, match="is not Jinja"):
        opened(str(tmp_path / "a.jsonl"), tmp_path, bare)
    (bare / "chat_template.jinja").write_text(CHATML)
    assert opened(str(tmp_path / "a.jsonl"), tmp_path, bare).train.has_answers


def talks(count):
    words = ["what", "is", "a", "shoal", "many", "fish", "as", "one"]
    for number in range(count):
        some = [words[(number * 5 + place * place) % 8] for place in range(4 + number % 5)]
        yield {
            "messages": [
                {"role": "user", "content": " ".join(some)},
                {"role": "assistant", "content": " ".join(reversed(some))},
            ]
        }


def test_the_loss_of_a_step_is_the_mean_over_answers_computed_by_hand(training, tmp_path, chat_tokenizer):
    source = write(tmp_path / "chat.jsonl", list(talks(60)))
    options = {
        "data__source": source,
        "data__tokenizer": chat_tokenizer,
        "data__format": "chat",
        "data__packing": False,
        "recipe__precision": "fp64",
        "recipe__seq": 48,
        "recipe__steps": 1,
    }
    made = training("chat", **options)
    batch = made.loader.rows(1, range(8))
    network = network_of(made)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(chat_tokenizer / "tokenizer.json"), chat_template=CHATML, eos_token="<|im_end|>"
    )
    total, count = 0.0, 0
    with torch.no_grad():
        for row in range(8):
            tokens = batch.tokens[row : row + 1]
            scores = network.lm_head.logits(network(tokens, batch.positions[row : row + 1])).log_softmax(-1)[
                0
            ]
            # By hand: a token is learned from the one after "<|im_start|>assistant\n" to the next "<|im_end|>".
            ids = tokens[0].tolist()
            header = theirs.encode("<|im_start|>assistant\n", add_special_tokens=False)
            (begin,) = [at for at in range(len(ids)) if ids[at : at + len(header)] == header]
            place = begin + len(header)
            while True:
                total -= float(scores[place - 1, ids[place]])
                count += 1
                if ids[place] == theirs.eos_token_id:
                    break
                place += 1
    assert made.program.own_targets([batch]) == count
    made.run_to_end(lambda: False)
    (row,) = read_rows(made.run.metrics)
    assert row["loss"] == pytest.approx(total / count, rel=1e-12)
    (sample,) = read_rows(made.run.samples)
    assert sample["prompt"].startswith("<|im_start|>user\n")
    assert sample["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n")
