"""Looks at a machine before a run: what decides the speed of several ranks, fact by fact.

Each topic has a small reader of facts and a pure function from facts to verdicts. Readers ask
the kernel, the packages and the drivers; they run at the same moment and each has a limit, so
that nothing can hang. torch is imported in a process of its own: a torch that is missing,
crashes or hangs costs one line.
"""
