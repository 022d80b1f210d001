"""What really happens in a run: the collectives it issues, the bytes it holds."""
