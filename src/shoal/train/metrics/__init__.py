"""What a run reports, step by step."""
