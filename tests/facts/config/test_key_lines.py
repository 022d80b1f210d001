"""The line of every key, whatever TOML allows around it."""

from __future__ import annotations

import tomllib

from shoal.facts.config.key_lines import key_lines

TEXT = '''\
layout = "dp=2" # seq = 3
run.name = "a = b"
"quoted" = 1
'literal.dot' . "x" = 2
[ recipe ]   # [not.a.table]
lr = 1.5
note = """
batch = 3 # not here
a \\""" = 4
"""
same = \'\'\'
batch = 4\'\'\'
batch = [ 1,
  2, # weight = 3
  { a = 1, b = { c = "x = 4" } },
  [ { deep = 1 }, { deep = 2 } ],
]
empty = {}
text = ""
[[data.mix]]
source = "a"
[[ data . "mix" ]] # the second
source = "b"
weight = 2
[data.mix.extra]
when = 1979-05-27T07:32:00Z
[model]
lora = {rank = 3, targets = ["a", "b"]}
'''


def test_lines_are_those_of_the_text() -> None:
    tomllib.loads(TEXT)
    lines = key_lines(TEXT)
    written = TEXT.splitlines()
    expected = {
        "layout": "layout =",
        "run.name": "run.name",
        "quoted": '"quoted"',
        "literal.dot.x": "'literal.dot'",
        "recipe": "[ recipe ]",
        "recipe.lr": "lr =",
        "recipe.note": "note =",
        "recipe.same": "same =",
        "recipe.batch": "batch = [",
        "recipe.batch.2.a": "  { a = 1",
        "recipe.batch.2.b": "  { a = 1",
        "recipe.batch.2.b.c": "  { a = 1",
        "recipe.batch.3.1.deep": "  [ { deep",
        "recipe.empty": "empty =",
        "recipe.text": "text =",
        "data.mix": "[[data.mix]]",
        "data.mix.0.source": 'source = "a"',
        "data.mix.1": "[[ data .",
        "data.mix.1.source": 'source = "b"',
        "data.mix.1.weight": "weight = 2",
        "data.mix.1.extra.when": "when",
        "model": "[model]",
        "model.lora.rank": "lora",
        "model.lora.targets": "lora",
    }
    for key, start in expected.items():
        assert written[lines[key] - 1].startswith(start), key


def test_nothing_else_is_a_key() -> None:
    assert not any("not" in key.split(".") or key.endswith((".c.x", "weight.3")) for key in key_lines(TEXT))
    assert key_lines("") == {}
    assert key_lines("# a = 1\n\n# [b]\n") == {}


def test_other_separators_of_lines_do_not_count() -> None:
    assert key_lines('a = "\u2028\x85"\nb = 1')["b"] == 2
