"""What people and other tools write: read within limits, and understood where it can be."""
