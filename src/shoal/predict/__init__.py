"""What it will cost. Never imports torch."""
