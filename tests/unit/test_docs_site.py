"""The documentation's site builds without a warning; links and the page of commands are true."""

import itertools
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "benchmarks", ROOT / "notebooks")
    for path in folder.glob("*.md")
)


def slugs(text):
    """Returns the anchors of a page's headings, as GitHub makes them."""
    tokens = MarkdownIt().parse(text)
    titles = [
        "".join(child.content for child in after.children)
        for token, after in itertools.pairwise(tokens)
        if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(text):
    """Returns where links and pictures of a page lead."""
    for token in MarkdownIt().enable("table").parse(text):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target:
                yield target


def test_site_builds_without_a_warning(tmp_path):
    """Of Sphinx's own: broken links between pages, pages that no list names, wrong markup."""
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    index = (tmp_path / "docs" / "index.html").read_text()
    # Nothing is fetched from elsewhere.
    assert not re.findall(r"""<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//[^"]+""", index)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(page):
    broken = []
    for target in links(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        if not file.exists() or (
            anchor and file.suffix == ".md" and anchor not in slugs(file.read_text())
        ):
            broken.append(target)
    assert broken == []


def test_slugs_are_those_of_github():
    text = "# A, b `c` & d\n\n## `plan`: what it's for\n"
    assert slugs(text) == {"a-b-c--d", "plan-what-its-for"}
    assert list(links("[a](b.md#c) ![d](e.png) <https://f.org>")) == [
        "b.md#c",
        "e.png",
        "https://f.org",
    ]


def test_page_of_commands_is_what_they_say():
    """Else run: python docs/generate_cli.py."""
    generate = runpy.run_path(str(ROOT / "docs" / "generate_cli.py"))
    assert generate["PAGE"].read_text() == generate["page"]()
