"""Self-tuning runs: the first steps are trained in several layouts, the rest in the fastest of them.

Every layout computes the same run, so a step that tries a layout is a step of the run like any other.
"""
