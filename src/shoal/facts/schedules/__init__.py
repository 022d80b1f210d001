"""Pipeline schedules as data; ``facts/schedule.py`` is the entry point."""
