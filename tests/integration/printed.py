"""Finds the shell commands that documents print, each with its place.

Taken as commands are

- fenced blocks marked as shell, and in other indented or fenced blocks each paragraph that begins
  with a program that is known here; with ``$ `` before a line it is a transcript, in which the
  other lines are output;
- code within a sentence that begins with such a program and names all that it needs: no RUN, DIR
  or `...` in it, and more than a command's bare name;
- in a launcher, indented lines of the comment at its head.

What continues a command (``\\``, the body of a loop) belongs to it: the shell itself says whether
it is complete.
"""

import itertools
import re
import shlex
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

# fmt: off
PROGRAMS = frozenset((
    "torchrun", "ddp-profiler", "python", "python3", "pip", "pytest", "ruff", "mypy", "make",
    "git", "jq", "scp", "ssh", "rsync", "ip", "tc", "srun", "sbatch", "scontrol", "sinfo",
    "kubectl", "apt-get", "sudo", "systemctl", "sysctl", "docker", "jupyter", "mkdocs", "cd",
    "export", "source", ".", "for", "while", "if", "mkdir", "cp", "mv", "rm", "ls", "cat",
    "curl", "wget",
))
# fmt: on
OURS = ("launch/", "benchmarks/", "./", ".ci/", ".venv/")
"""How a program of this repository is called by its path."""

SHELL = ("sh", "bash", "shell", "console")
PLAIN = ("", "text")
"""Languages of blocks that may hold commands or anything else."""

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=\S*\s+")
_META = re.compile(r"[A-Z][A-Z_]*|.*(\.\.\.|…|[<>|]).*")
_SAVED_AS = re.compile(r"(?:[Ss]ave|[Pp]ut|[Ww]rite)[^`]*`([\w/]+\.py)`")


class NotUnderstood(Exception):
    """A block of which it cannot be told what is a command: a document must be clearer."""


@dataclass(frozen=True)
class Command:
    """A command as a document prints it.

    Attributes:
        text: What is given to the shell.
        file: The document, below the repository's root.
        line: Its first line there, counted from 1.
        output: What the document prints below it, in a transcript.
    """

    text: str
    file: str
    line: int
    output: str = ""

    @property
    def place(self):
        return f"{self.file}:{self.line}"

    @property
    def key(self):
        """The same for commands that differ in blanks, line ends and comments only."""
        return " ".join(shlex.split(self.text.replace("\\\n", " "), comments=True))


def begins_with_program(line):
    """Tells whether a line begins with a program that is known, after variables and `(`.

    >>> [begins_with_program(line) for line in ("A=1 pip list", "(cd x", "launch/lab", "step = 1")]
    [True, True, True, False]
    """
    line = line.lstrip("( ")
    while assignment := _ASSIGNMENT.match(line):
        line = line[assignment.end() :]
    word = line.split(maxsplit=1)[0] if line.strip() else ""
    return word in PROGRAMS or (word.startswith(OURS) and len(word) > len("launch/"))


def is_complete(text):
    """Tells whether a shell would run this, or wait for more lines."""
    if text.rstrip().endswith("\\"):
        return False
    return (
        subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0
    )


def is_whole(text):
    """Tells whether code within a sentence can be run as it stands.

    >>> is_whole("ddp-profiler analyze runs/NAME"), is_whole("ddp-profiler analyze RUN")
    (True, False)
    """
    if not begins_with_program(text) or not is_complete(text):
        return False
    words = [word for word in shlex.split(text) if not _ASSIGNMENT.match(word + " ")]
    if any(_META.fullmatch(word) for word in words) or words[-1] in ("-m", "-c", "--"):
        return False
    if words[:2] == ["ddp-profiler", "doctor"]:
        return True
    if words[0].startswith(OURS):
        return len(words) > 1
    # More than a name: something that it is done to.
    names = 2 if words[0] == "ddp-profiler" else 1
    return any(not word.startswith("-") for word in words[names:])


def _statements(lines):
    """Yields each statement of numbered lines, as its number and its text."""
    held, first = [], 0
    for number, line in lines:
        if not held:
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            first = number
        held.append(line)
        text = "\n".join(held)
        if is_complete(text):
            yield first, text
            held = []
    if held:
        raise NotUnderstood(f"line {first}: the shell takes this for unfinished: {held[0]}")


def _of_transcript(lines):
    """Yields number, command and output; a command is what follows ``$ ``."""
    lines = list(lines)
    while lines:
        number, line = lines.pop(0)
        if not line.startswith("$ "):
            continue
        text = line.removeprefix("$ ")
        while not is_complete(text):
            if not lines:
                raise NotUnderstood(f"line {number}: the shell takes this for unfinished: {line}")
            text += "\n" + lines.pop(0)[1].removeprefix("> ")
        shown = list(itertools.takewhile(lambda rest: not rest[1].startswith("$ "), lines))
        yield number, text, "\n".join(line for _, line in shown).strip()


def _paragraphs(lines):
    """Yields groups of lines that no blank line divides; one begins below `Examples:` as well."""
    held = []
    for number, line in lines:
        if not line.strip() or re.fullmatch(r"\s*Examples?\b.*:", line):
            if held:
                yield held
            held = []
        else:
            held.append((number, line))
    if held:
        yield held


def _dedented(lines):
    if not lines:
        return []
    text = textwrap.dedent("\n".join(line for _, line in lines))
    return list(zip((number for number, _ in lines), text.split("\n"), strict=True))


def of_block(lines, language=""):
    """Yields number, command and output of a block's numbered lines."""
    if language not in (*SHELL, *PLAIN):
        return
    lines = _dedented(lines)
    if any(line.startswith("$ ") for _, line in lines):
        yield from _of_transcript(lines)
        return
    if language in SHELL:
        for number, text in _statements(lines):
            yield number, text, ""
        return
    for paragraph in _paragraphs(lines):
        paragraph = _dedented(paragraph)
        spoken = [line for line in paragraph if not line[1].startswith("#")]
        if spoken and begins_with_program(spoken[0][1]):
            for number, text in _statements(paragraph):
                if not begins_with_program(text):
                    raise NotUnderstood(f"line {number}: no known program begins this: {text}")
                yield number, text, ""
        for number, line in paragraph:
            hidden = line.startswith(("torchrun ", "ddp-profiler "))
            if hidden and not begins_with_program(spoken[0][1]):
                raise NotUnderstood(f"line {number}: a command below what is none: {line}")


def _numbered(token):
    """Returns a block's lines with their numbers in the file."""
    first = token.map[0] + (2 if token.type == "fence" else 1)
    return list(enumerate(token.content.rstrip("\n").split("\n"), start=first))


def _blocks(text):
    """Yields the tokens of a document in Markdown, and of each the sentence before it."""
    before = ""
    for token in MarkdownIt().enable("table").parse(text):
        yield token, before
        if token.type == "inline":
            before = token.content


def of_markdown(text, file):
    """Returns the commands of a document."""
    found = []
    for token, _ in _blocks(text):
        try:
            if token.type in ("fence", "code_block"):
                found += [
                    Command(command, file, number, output)
                    for number, command, output in of_block(_numbered(token), token.info.strip())
                ]
        except NotUnderstood as error:
            raise NotUnderstood(f"{file}: {error}") from None
        line = (token.map or [0])[0] + 1
        for part in token.children or ():
            if part.type == "softbreak":
                line += 1
            elif part.type == "code_inline" and is_whole(part.content):
                found.append(Command(part.content, file, line))
    return found


def of_launcher(text, file):
    """Returns the commands in the comment at the head of a launcher."""
    head = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.startswith("#"):
            break
        if re.match(r"#\s{2,}\S", line):
            head.append((number, line[1:]))
        else:
            head.append((number, ""))
    return [Command(command, file, number, output) for number, command, output in of_block(head)]


def files_of(text):
    """Returns the Python files that a document tells to save, by name.

    Their block begins with `# NAME.py`, or the sentence before it says "save this as `NAME.py`".
    """
    files = {}
    for token, before in _blocks(text):
        if token.type != "fence" or token.info.strip() != "python":
            continue
        named = re.match(r"# ([\w/]+\.py)\n", token.content) or _SAVED_AS.search(before)
        if named:
            files[named[1]] = token.content
    return files


def documents(root: Path):
    """Returns the documents that people read, and the launchers."""
    found = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("notebooks/*.md")]
    found = [path for path in found if path.name != "CHANGELOG.md"]
    launchers = [path for path in root.glob("launch/*") if path.is_file()]
    first = [root / "README.md", root / "docs" / "quickstart.md"]
    return sorted(found, key=lambda path: (path not in first, path)) + sorted(launchers)


def commands(root: Path):
    """Returns all commands of this repository's documents, README's first."""
    found = []
    for path in documents(root):
        file = str(path.relative_to(root))
        read = of_markdown if path.suffix == ".md" else of_launcher
        found += read(path.read_text(encoding="utf-8"), file)
    return found
