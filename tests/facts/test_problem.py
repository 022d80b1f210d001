"""What is wrong, and what was probably meant."""

from __future__ import annotations

from shoal.facts.problem import BadInput, Problem, closest, did_you_mean


def test_a_problem_is_printed_with_its_fix() -> None:
    assert str(Problem("no")) == "no"
    assert str(BadInput([Problem("no", "yes"), Problem("never")])) == "no\n  fix: yes\nnever"
    assert BadInput("no", "yes").problems == (Problem("no", "yes"),)


def test_what_was_probably_meant() -> None:
    assert closest("Sead", ["seed", "steps"]) == "seed"
    assert closest("adamw", ["AdamW"]) == "AdamW"
    assert closest("", ["seed"]) is None
    assert did_you_mean("sed", ["seed", "steps"]) == "did you mean 'seed'?"
    assert did_you_mean("xyz", ["seed", "lr"]) == "known: lr, seed"
