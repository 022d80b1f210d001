"""``python -m shoal``: the same as ``shoal``."""

from shoal.cli.main import main

main()
