"""Shoal: many GPUs, one training run."""

__version__ = "0.1.0"
