"""Start workers on this machine and on several."""
