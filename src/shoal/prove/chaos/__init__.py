"""Inject faults into a real run and prove that they changed nothing."""
