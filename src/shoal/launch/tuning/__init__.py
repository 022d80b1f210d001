"""Self-tuning runs: train the first steps in several layouts, the rest in the fastest of them.

Every layout computes the same run, so a step in a trial layout is a regular step of the run.
"""
