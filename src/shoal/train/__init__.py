"""Training: the loop, the step, data, checkpoints, metrics."""
