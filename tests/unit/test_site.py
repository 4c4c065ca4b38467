"""The site of the documents: its checks find what is planted, and its made pages are true."""

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ddp_profiler import cli
from ddp_profiler.cli import worker_options

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

PLANTED = {
    "[a page](no-page.md)": "no-page.md",
    "[an anchor](metrics.md#no-heading)": "no-heading",
    "[an anchor of this page](#no-place)": "no-place",
    "[an anchor outside](../README.md#no-section)": "no-section",
    "[a file outside](../launch/no-launcher.sh)": "no-launcher.sh",
    "[a folder](../no-folder/)": "no-folder",
    "![a picture](images/no-picture.png)": "no-picture.png",
}
"""What is wrong in Markdown, and what a warning about it must name."""


@pytest.fixture(scope="module")
def generate_cli():
    spec = importlib.util.spec_from_file_location("generate_cli", DOCS / "generate_cli.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def warnings(tmp_path_factory):
    """What a build says about the documents as they are, with some mistakes planted into one."""
    pytest.importorskip("myst_parser")
    tree = tmp_path_factory.mktemp("site") / "tree"
    for name in ("docs", "launch", "benchmarks", "notebooks"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name)
    for page in ROOT.glob("*.md"):
        shutil.copy(page, tree)
    (tree / "LICENSE").write_text("")
    with (tree / "docs/plan.md").open("a") as page:
        page.write("\n".join(f"\n{mistake}" for mistake in PLANTED))
    with (tree / "docs/index.md").open("a") as page:
        page.write("\n- [Gone](gone.md): a page that was removed\n")
    (tree / "docs/left-out.md").write_text("# Left out\n")
    # Its docstrings need torch, which takes longer than all else; `make docs` shows them.
    (tree / "docs/api-reference.md").write_text("# Python names\n")
    build = [sys.executable, "-m", "sphinx", "-q", "-b", "dummy", "-c", "docs"]
    build += ["-D", "extensions=myst_parser", ".", "../built"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "NO_COLOR": "1"}
    done = subprocess.run(build, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "WARNING" in line or "ERROR" in line]


@pytest.mark.parametrize("name", [*PLANTED.values(), "left-out.md", "gone"])
def test_what_is_wrong_is_found(warnings, name):
    assert any(name in line for line in warnings), warnings


def test_nothing_else_is_wrong(warnings):
    """Links and anchors of all documents hold, and each page is in the navigation."""
    planted = (*PLANTED.values(), "left-out.md", "gone")
    assert [line for line in warnings if not any(name in line for name in planted)] == []


def headings(text):
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^(#+) ", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "page", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda page: page.name
)
def test_one_title(page):
    levels = [len(marks) for marks in headings(page.read_text(encoding="utf-8"))]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_the_commands_page_is_what_help_says(generate_cli):
    assert generate_cli.PAGE.read_text(encoding="utf-8") == generate_cli.page(), (
        "call: python docs/generate_cli.py"
    )


def test_every_option_has_its_row(generate_cli):
    context = click.Context(cli._group)
    commands = {generate_cli.WORKER: worker_options.command}
    for name in cli._group.list_commands(context):
        commands[f"{cli.NAME} {name}"] = cli._group.get_command(context, name)
    page = generate_cli.PAGE.read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## `(.+?)`\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    assert len(commands) > 8
    for title, command in commands.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                row = rf"^\| `{parameter.opts[0]}\b[^`]*` \| .*[.\w] \|$"
                assert re.search(row, sections[title], re.MULTILINE), (title, parameter.opts)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("see docs/lab.md.", "see [lab.md](lab.md)."),
        ("with --dp and a*b at 5 Gbit/s", r"with `--dp` and a\*b at 5 Gbit/s"),
        ("x (torchrun -m ddp_profiler.run).", "x (`torchrun -m ddp_profiler.run`)."),
        ("a micro-batch, 1-2", "a micro-batch, 1-2"),
    ],
)
def test_names_become_code(generate_cli, said, shown):
    assert generate_cli._marked(said) == shown


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("A.  [default: 5]", "A. Default: `5`."),
        ("A.  [default: one a core]  [x>=1]", "A. Default: one a core. At least 1."),
        ("A.  [default: 1; x>0]", "A. Default: `1`. More than 0."),
        ("A.  [required]", "A. Required."),
        ("A [b] c", r"A \[b\] c"),
    ],
)
def test_brackets_of_click_become_sentences(generate_cli, said, shown):
    assert generate_cli._defaults_apart(said) == shown
