"""Input from people and other tools: read within limits, and interpreted where possible."""
