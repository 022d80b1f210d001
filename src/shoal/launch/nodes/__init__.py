"""Train on several machines: one launcher with its own agent per node; one of them leads."""
