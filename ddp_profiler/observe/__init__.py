"""Observes training on one rank, of scripts that are run and of programs with a line in them."""
