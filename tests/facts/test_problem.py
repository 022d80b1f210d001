"""What is wrong, and what was probably meant."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(
    ("word", "known"),
    [
        ("epochs", ["eps", "steps"]),
        ("save_steps", ["steps"]),
        ("fp4", ["fp64", "fp8"]),
        ("llama3-7b", ["llama3-70b", "llama3-8b"]),
        ("eth1", ["eth0"]),
        ("launch", ["plan"]),
        ("pd", ["dp", "pp"]),
    ],
)
def test_what_only_looks_alike_is_not_suggested(word: str, known: list[str]) -> None:
    assert closest(word, known) is None
    assert did_you_mean(word, known).startswith("known: ")


def test_slips_of_the_fingers_and_beginnings_are_understood() -> None:
    known = ["weight_decay", "warmup", "beta1", "beta2", "optimizer", "batch"]
    assert closest("weight_deacy", known) == "weight_decay"
    assert closest("bacth", known) == "batch"
    assert closest("optimiser", known) == "optimizer"
    assert closest("warm", known) == "warmup"
    assert closest("beta", known) is None
    assert did_you_mean("beta", known) == "did you mean 'beta1' or 'beta2'?"
