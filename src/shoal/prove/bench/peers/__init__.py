"""The peers of a benchmark: one file each, with one function, `train(setup, journal)`.

A peer is a whole training loop, as its own documentation would write it, that takes its batches from the journal and
tells it each step's loss. The journal decides when a step may begin, and times it: a loop cannot time itself in its
own favour, and Shoal's loop needs no door of its own to be driven from outside. A peer's process is its life: what it
holds is freed by its end.
"""
