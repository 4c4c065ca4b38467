"""A run for those who want to look closer: its tables as data frames, its figures, and plans.

Names and units of columns are declared in :mod:`ddp_profiler.notebook.columns` and described in
docs/python-api.md. Nothing is derived here: numbers are those of the analysis.
"""
