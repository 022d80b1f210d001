"""Pipeline schedules as data; ``facts/schedule.py`` is the way in."""
