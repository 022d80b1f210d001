"""A live view of a run that is going on, or of one that is over: in the terminal, or as a page."""
