"""The commands of the `megallm` command line, one a file."""
