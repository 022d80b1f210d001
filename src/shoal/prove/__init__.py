"""Proof that a layout changes nothing, before or beside a run."""
