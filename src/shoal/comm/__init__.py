"""Collectives measured and shown: their times by size, the rates fitted to them, a ring all-reduce to read."""
