"""Checkpoints, independent of the layout that wrote them."""
