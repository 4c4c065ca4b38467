"""Breaks the profiler's file in the middle of training."""

import train

from ddp_profiler.record import writer

written = []
write = writer.SpanWriter.write


def full(self, columns):
    written.append(1)
    if len(written) > 2:
        raise OSError("planted: no space left")
    write(self, columns)


writer.SpanWriter.write = full
train.main(["plain"])
