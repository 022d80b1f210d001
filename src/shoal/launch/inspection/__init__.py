"""``shoal doctor --cluster``: every node of a job is looked at and compared with the others."""
