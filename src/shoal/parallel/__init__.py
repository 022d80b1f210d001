"""How the work is split: one file a strategy, and apply.py that composes them."""
