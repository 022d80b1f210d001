"""A live view of a running or finished run: in the terminal, or as a page."""
