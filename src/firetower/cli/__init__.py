"""The command line: one file a command, whose docstring is its help."""
