"""Writes docs/cli.md, the reference of all commands, from what their --help says.

Call it by `python docs/generate_cli.py` after a change of options or help texts.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from ddp_profiler import cli
from ddp_profiler.cli import worker_options

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "cli.md"

WORKER = "torchrun ... -m ddp_profiler.run"
LAB = "launch/lab"

_HEAD = """\
# Commands

Made from `--help` by `python docs/generate_cli.py`; do not edit it here. `NAME` in examples is the
name of a run folder: each run says its own when it ends.

| Command | Does |
| --- | --- |
"""

_CODE = re.compile(
    r"(?<![\w/.`-])(?:"
    r"--?[a-z][\w-]*"  # options
    r"|(?!\w*bit/s)[\w.-]+(?:/[\w.-]+)+/?|[\w-]+/(?!\w)"  # paths
    r"|[\w-]*\.(?:html|json(?:\.gz)?|txt|py|md)"  # files
    r"|torch\.profiler|\w+_\w+(?:\.\w+)*|(?:\w+:)?\w+=[\w=,.-]+|\{\w+\}"  # names
    r"|torchrun|python|sh -c|ddp-profiler [a-z]+ RUN|NODE=SECONDS|K=V"
    r")(?![\w/])"
)
_LIMITS = {"x>=": "At least", "x>": "More than"}


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Returns the page, in Markdown that reads well on GitHub too."""
    group = cli._group
    context = click.Context(group, info_name=cli.NAME)
    sections = [_section(WORKER, worker_options.command, click.Context(worker_options.command))]
    sections.append(_section(cli.NAME, group, context))
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        sections.append(
            _section(f"{cli.NAME} {name}", command, click.Context(command, context, name))
        )
    sections.append(_lab_section())
    rows = [
        f"| [`{title}`](#{_anchor(title)}) | {_marked(purpose)} |" for title, purpose, _ in sections
    ]
    return _HEAD + "\n".join(rows) + "\n" + "".join(text for _, _, text in sections)


def _section(title: str, command: click.Command, context: click.Context) -> tuple[str, str, str]:
    usage = " ".join((title, *command.collect_usage_pieces(context)))
    records = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts and parameter.opts[0][0] == "-":
            records.append(record)
    help_text = inspect.cleandoc(command.help or "")
    purpose = help_text.split("\n\n")[0].replace("\n", " ")
    return title, purpose, _text(title, f"Usage: {usage}", help_text, records)


def _lab_section() -> tuple[str, str, str]:
    sys.path.insert(0, str(DOCS.parent / "launch"))
    try:
        parser: argparse.ArgumentParser = importlib.import_module("lab")._parser()
    finally:
        sys.path.pop(0)
    records = []
    for action in parser._actions:
        if "--help" not in action.option_strings:
            wanted = action.metavar or "|".join(action.choices or ())
            said = (action.help or "").replace("; default: ", ". Default: ")
            sentence = f"{said[:1].upper()}{said[1:]}."
            records.append((f"{', '.join(action.option_strings)} {wanted}", sentence))
    purpose = parser.description or ""
    help_text = f"{purpose}\n\n{parser.epilog}"
    return LAB, purpose, _text(LAB, f"Usage: {parser.usage}", help_text, records)


def _text(title: str, usage: str, help_text: str, records: Iterable[tuple[str, str]]) -> str:
    """Returns a command's section."""
    purpose, *rest = _prose(help_text)
    return "\n".join((f"\n## `{title}`\n", purpose, _block(usage), *rest, *_table(records), ""))


def _anchor(title: str) -> str:
    """Returns the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _block(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _prose(text: str) -> Iterator[str]:
    """Yields the paragraphs of a help text; what click leaves as it stands becomes a block."""
    for paragraph in text.split("\n\n"):
        if not paragraph.startswith("\b\n"):
            yield _marked(" ".join(paragraph.split())) + "\n"
            continue
        lines = paragraph.removeprefix("\b\n").split("\n")
        while lines:
            indented = lines[0].startswith(" ")
            end = next((i for i, x in enumerate(lines) if x.startswith(" ") != indented), None)
            taken, lines = lines[:end], lines[end:] if end else []
            if indented:
                yield _block(inspect.cleandoc("\n" + "\n".join(taken)))
            else:
                yield _marked(" ".join(taken)) + "\n"


def _table(records: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield "| Option | |\n| --- | --- |"
    for names, text in records:
        cell = re.sub(r"\|", r"\\|", f"`{names.strip()}`")
        yield f"| {cell} | {_defaults_apart(text)} |"


def _defaults_apart(text: str) -> str:
    """Returns an option's text with what click puts into brackets said in sentences."""
    said, *extras = re.split(r"  \[(?=required|default: |x>)", text)
    sentences = [_marked(said)]
    for extra in (word for text in extras for word in text.rstrip("] ").split("; ")):
        name, colon, value = extra.partition(": ")
        limit = re.fullmatch(r"(x>=?)(\d+)", extra)
        if limit:
            sentences.append(f"{_LIMITS[limit[1]]} {limit[2]}.")
        elif colon:
            shown = _marked(value) if " " in value else f"`{value}`"
            sentences.append(f"Default: {shown}.")
        else:
            sentences.append(f"{name.capitalize()}.")
    return " ".join(sentences)


def _marked(text: str) -> str:
    """Returns text as Markdown: names in code, links to documents, nothing else with a meaning."""
    parts = []
    end = 0
    for found in _CODE.finditer(text):
        parts += [_escaped(text[end : found.start()]), _name(found[0])]
        end = found.end()
    # What stands side by side is one command.
    return ("".join(parts) + _escaped(text[end:])).replace("` `", " ")


def _name(name: str) -> str:
    name, dot = (name[:-1], ".") if name.endswith(".") else (name, "")
    if name.startswith("docs/"):
        target = name.removeprefix("docs/")
        return f"[{target}]({target}){dot}"
    return f"`{name}`{dot}"


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", text)


if __name__ == "__main__":
    main()
