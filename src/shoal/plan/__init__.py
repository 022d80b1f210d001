"""Which layout. Never imports torch."""
