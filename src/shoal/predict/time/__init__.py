"""Step time: kernels, links, pipelines, the optimizer, offload."""
