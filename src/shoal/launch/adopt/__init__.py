"""Ranks that another launcher started (torchrun, srun, mpirun, a pod): found in the environment, and adopted."""
