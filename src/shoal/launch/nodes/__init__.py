"""Several machines at one run: each has a launcher with an agent of its own, and one of the launchers leads."""
