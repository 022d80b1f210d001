"""The peers of a benchmark: one file each, with one function, `train(setup, journal)`.

A peer is a whole training loop, as its own documentation would write it, that takes its batches from the journal and
reports each step's loss to it. The journal decides when a step may begin, and times it: so a loop cannot time itself in
its own favour, and Shoal's loop needs no special entry point. A peer's memory is freed when its process ends.
"""
