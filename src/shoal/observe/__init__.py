"""What a run actually does: the collectives it issues, the bytes it holds, the time it takes."""
