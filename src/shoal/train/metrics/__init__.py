"""What a run reports of itself, step by step."""
