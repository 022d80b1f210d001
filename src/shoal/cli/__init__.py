"""The command line: one file a command. Parse, call, print."""
