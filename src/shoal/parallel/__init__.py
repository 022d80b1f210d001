"""How the work is split: one file per strategy, composed in ``apply.py``."""
