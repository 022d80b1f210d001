"""Ranks started by another launcher (torchrun, srun, mpirun, a pod): found in the environment, and adopted."""
