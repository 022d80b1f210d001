"""`shoal bench step`: a training step of Shoal next to other stacks' steps, on the hardware at hand."""
