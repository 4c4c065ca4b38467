"""The run folder: names of its files, writing and reading. Needs no torch."""
