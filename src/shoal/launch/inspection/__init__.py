"""``shoal doctor --cluster``: examine every node of a job and compare it with the others."""
