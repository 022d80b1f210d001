"""Checkpoints that know nothing of the layout that wrote them."""
