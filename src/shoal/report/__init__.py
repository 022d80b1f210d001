"""Pictures and pages: a run's report, a live view of it, a plan."""
