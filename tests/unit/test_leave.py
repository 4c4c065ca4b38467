"""A process that leaves without tearing the interpreter down loses nothing that files hold back."""

import gzip
import subprocess
import sys
import textwrap


def test_what_open_files_hold_back_is_written(tmp_path):
    program = f"""
        import atexit, gzip, os, sys
        from pathlib import Path
        from ddp_profiler.measure.leave import leave

        folder = Path({str(tmp_path)!r})
        held = [open(folder / "text", "w"), open(folder / "bytes", "wb")]
        held.append(gzip.open(folder / "gz", "wt"))
        held[0].write("text")
        held[1].write(b"bytes")
        held[2].write("packed")
        cycle = [open(folder / "cycle", "w")]
        cycle[0].write("in a cycle")
        cycle.append(cycle)
        del cycle
        atexit.register(lambda: print("handler"))
        sys.stdout.write("no line's end")
        leave(5)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (5, "no line's endhandler\n", "")
    found = [(tmp_path / name).read_text() for name in ("text", "bytes", "cycle")]
    assert found == ["text", "bytes", "in a cycle"]
    assert gzip.open(tmp_path / "gz", "rt").read() == "packed"
