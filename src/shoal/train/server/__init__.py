"""Parameter servers: they hold parameters and optimizer states, hand out work, and update with what workers push."""
