"""Pipeline schedules as data; ``facts/schedules/programs.py`` is the entry point."""
