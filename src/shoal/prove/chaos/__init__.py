"""Faults, injected into a real run, and the proof that they changed nothing."""
