"""The command line: help, and a stdout that is closed, full or narrow in its characters."""

import json
import os
import socket
import subprocess
import sys

import pytest

from ddp_profiler import cli, run
from ddp_profiler.cli import worker_options
from ddp_profiler.errors import InputError
from ddp_profiler.record import parts
from ddp_profiler.report import console
from ddp_profiler.report.text import for_encoding

from .test_console import make_level, make_summary

NOTES = ("größer 漢",)
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# Without what reads runs: it takes 2 s to import.
COMMAND = """
import sys, types
from ddp_profiler.cli import main
if "run" in {0}:
    from tests.unit.test_cli import summary
    sys.modules["ddp_profiler.load"] = types.SimpleNamespace(load_summary=lambda run: summary())
main({0})
"""


def summary():
    return make_summary(make_level(), notes=NOTES)


def call(*arguments, shell="", stdout=subprocess.PIPE, **environment):
    """Runs main in a process of its own, with the summary above for every run folder."""
    python = [sys.executable, "-c", COMMAND.format(list(arguments))]
    command = ["bash", "-c", f'"$@" {shell}', "bash", *python] if shell else python
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))}
    return subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**kept, "PYTHONUTF8": "1", **environment},
        timeout=120,
    )


@pytest.mark.parametrize("arguments", [["--help"], ["analyze", "--help"]])
def test_help_keeps_its_examples(arguments):
    done = call(*arguments)
    text = done.stdout.decode()
    assert done.returncode == 0
    assert "\\b" not in text
    assert "\b" not in text
    lines = [line.strip() for line in text.splitlines()]
    assert "ddp-profiler analyze runs/NAME" in lines
    assert max(map(len, text.splitlines())) <= 80


def test_help_of_merge_has_a_whole_example():
    done = call("merge", "--help")
    text = done.stdout.decode()
    assert done.returncode == 0
    assert "ddp-profiler merge runs/NAME node1-part --out runs/NAME-joined" in text
    assert "merge" in call("--help").stdout.decode()
    assert max(map(len, text.splitlines())) <= 80


def test_no_arguments_show_the_help():
    done = call()
    assert done.returncode == 0
    assert done.stdout == call("--help").stdout
    assert done.stderr == b""


def test_stdout_takes_all():
    done = call("analyze", "run")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == console.render(summary())
    assert json.loads(call("analyze", "run", "--json").stdout)["notes"] == list(NOTES)


@pytest.mark.parametrize("arguments", [["analyze", "run"], ["analyze", "run", "--json"]])
@pytest.mark.parametrize(
    ("shell", "words"), [(">&-", "stdout is closed"), (">/dev/full", "No space left on device")]
)
def test_stdout_that_takes_nothing(arguments, shell, words):
    done = call(*arguments, shell=shell)
    assert done.returncode == 3
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("ddp-profiler: Cannot write the result")
    assert words in line


def test_help_on_a_full_device():
    done = call("--help", shell=">/dev/full")
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1


def test_reader_that_has_seen_enough():
    read, write = os.pipe()
    os.close(read)
    try:
        done = call("analyze", "run", stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("environment", [ASCII, {"PYTHONIOENCODING": "ascii"}])
def test_ascii_stdout(environment):
    done = call("analyze", "run", **environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("ascii") == for_encoding(console.render(summary()), "ascii")
    assert b"-----" in done.stdout
    done = call("analyze", "run", "--json", **environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout.decode("ascii"))["notes"] == list(NOTES)


def test_interrupt_ends_without_a_trace(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(parts, "merge", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main(["merge", "a", "b", "--out", "c"])
    assert ended.value.code == 130
    assert "Traceback" not in capsys.readouterr().err


def test_help_fits_a_terminal():
    assert max(len(line) for line in worker_options._MODELS.splitlines()) <= 78


def test_what_is_said_is_safe_for_a_terminal(capsys):
    run._say("model \x1b[31m\nsecond line")
    assert capsys.readouterr().err == "ddp_profiler.run: model \\x1b[31m\nsecond line\n"


@pytest.mark.parametrize("options", [(), ("-u",)])
def test_what_a_rank_says_is_one_write(options):
    # Ranks share stderr: of a line in two pieces the second may come after another rank's.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        subprocess.run(
            [sys.executable, *options, "-c", "from ddp_profiler import run; run._say('one\\ntwo')"],
            stderr=theirs,
            timeout=60,
            check=True,
        )
        assert ours.recv(1000) == b"ddp_profiler.run: one\ntwo\n"


def test_nobody_reads_what_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    run._say("text")
    assert run._complain(InputError("text"), speaks=True) == 3
    assert capsys.readouterr().out == ""
