"""The command line: `hearth --help`."""
