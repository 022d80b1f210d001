"""Prove that layouts change nothing: parity, dry run, profile, chaos."""
