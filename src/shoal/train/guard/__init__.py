"""What keeps a run honest while it goes on."""
