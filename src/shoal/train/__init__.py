"""Training: loop, step, data, checkpoints, metrics, guards."""
