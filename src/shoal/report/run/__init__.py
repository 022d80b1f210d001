"""A run's report: one file per section."""
