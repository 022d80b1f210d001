"""How workers are started: on this machine, and on the schedulers that run larger ones."""
