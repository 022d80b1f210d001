"""Guards: what detects faults while a run is training."""
