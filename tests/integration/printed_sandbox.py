"""Where printed commands run: a folder with all that the text presupposes, from real runs."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from . import printed
from .conftest import ROOT, Finished, environment, unaborted

STUDY = "torchrun --standalone --nproc_per_node=2 -m ddp_profiler.run"
"""A printed command whose run folder serves others, so that it is launched once."""

SCRIPTS = Path(__file__).parent / "scripts"
SIDES = f"python {shlex.quote(str(SCRIPTS / 'printed_launches.py'))} runs"
TRACED = f"{STUDY} --kineto 5 --model mlp --dp 2 --steps 10 --out runs/traced"
"""What makes the other runs and the traces."""

WRITTEN_TO = ("docs", "notebooks")
"""Folders of the repository in which a command may write; only those are copied."""

HELLO = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
print(f"rank {dist.get_rank()}: sum {total}")
dist.destroy_process_group()
"""


def run(text, folder, timeout):
    """Gives a command to a shell, as a user would in this folder, with this Python on the PATH.

    With ``pipefail``: what fails before a pipe's end fails.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    started = subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", text],
        cwd=folder,
        env=environment({"PATH": path, "OMP_NUM_THREADS": "1"}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = started.communicate(timeout=timeout)
    except BaseException:
        # torchrun's ranks are in this session too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        raise
    return Finished(started.returncode, out, err, folder)


class Sandboxes:
    """Runs printed commands, each once and in a folder of its own.

    Args:
        make_folder: Returns a new, empty folder.
    """

    def __init__(self, make_folder):
        self._make_folder = make_folder
        self._known = {}

    def done(self, command, timeout=170):
        """Returns the command's end; a command that is asked for again is not run again."""
        if command.key not in self._known:
            # What a part of us ends is not to abort.
            ours = "ddp_profiler" in command.text or "ddp-profiler" in command.text
            done = unaborted(lambda: self._run(command, timeout), most=1 if ours else 5)
            self._known[command.key] = done
        return self._known[command.key]

    def _run(self, command, timeout):
        folder = self._make_folder()
        self._furnish(folder, command)
        return run(command.text, folder, timeout)

    def _made_by(self, text):
        """Returns the run folders that a command makes, sorted."""
        done = self.done(printed.Command(text, "", 0))
        assert done.code == 0, f"{text}\n{done.err[-3000:]}"
        return sorted((done.folder / "runs").iterdir())

    def _furnish(self, folder, command):
        for path in ROOT.iterdir():
            if path.name in WRITTEN_TO:
                shutil.copytree(path, folder / path.name)
            elif not path.name.startswith(".") and path.name not in ("runs", "report", "traces"):
                (folder / path.name).symlink_to(path)
        train = SCRIPTS / "printed_train.py"
        for name in ("train.py", "package/train.py", "base/train.py", "new/train.py"):
            _write(folder / name, train.read_text())
        _write(folder / "hello.py", HELLO)
        _write(folder / "FILE", (ROOT / "README.md").read_text())
        if command.file.endswith(".md"):
            for name, text in printed.files_of((ROOT / command.file).read_text()).items():
                _write(folder / name, text)
        self._bring(folder, command)

    def _bring(self, folder, command):
        """Copies the run folders and traces that a command names to where it looks for them."""
        words = shlex.split(command.text.replace("\\\n", " "), comments=True)
        reads_traces = words[:2] == ["ddp-profiler", "trace"]
        for before, word in zip(["", *words], words, strict=False):
            path = folder / word
            if before in ("--out", "--timeline") or path.exists():
                continue
            if side := re.fullmatch(r"(?:runs/)?(base|new)-(?:\*|runs/)", word, re.IGNORECASE):
                for run_folder in self._made_by(SIDES):
                    if run_folder.name.startswith(side[1]):
                        parent = path.parent if word.endswith("*") else path
                        shutil.copytree(run_folder, parent / run_folder.name)
            elif word in ("runs/BASE", "runs/NEW"):
                made = {made.name: made for made in self._made_by(SIDES)}
                shutil.copytree(made[f"{path.name.lower()}-1"], path)
            elif word == "runs*/*":
                # What the command above it in the transcript leaves.
                for node in ("node0", "node1"):
                    _write(folder / f"runs.{node}" / "mine", node)
            elif word.startswith("runs/"):
                (made,) = self._made_by(TRACED if reads_traces else STUDY)
                shutil.copytree(made, folder / word.replace("*", "1"))
            elif word.startswith("traces"):
                shutil.copytree(self._traces(), path)
            elif re.fullmatch(r"\w+\.json\.gz", word):
                shutil.copy(self._traces() / "rank-00000.json.gz", path)
        if words[:2] == ["ddp-profiler", "merge"]:
            self._part(folder, words[2], words[3])

    def _traces(self):
        """Returns a folder with the traces of two ranks."""
        (made,) = self._made_by(TRACED)
        (level,) = (made / "kineto").iterdir()
        assert len(list(level.iterdir())) == 2
        return level

    def _part(self, folder, first, second):
        """Leaves each of two nodes the files of its own ranks."""
        shutil.copytree(folder / first, folder / second)
        (folder / first / "rank-00001.arrows").unlink()
        (folder / second / "rank-00000.arrows").unlink()


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
