"""How long a step takes: kernels, links, pipelines, the optimizer, offload."""
