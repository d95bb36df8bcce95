"""The command line: one function per command. Owns arguments and exit codes; the work is done elsewhere."""
