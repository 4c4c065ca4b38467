"""How Sphinx makes a site of the Markdown files; `make docs` calls it.

The source is the repository's root, so that links between docs/, README.md and CONTRIBUTING.md are
the same on GitHub and in the site, and are checked here with their anchors. What is no page, such
as a launcher, becomes a download.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

from ddp_profiler import __version__

project = "ddp_profiler"
version = release = __version__
root_doc = "docs/index"
# A page in none of these is not read at all; one that is in no group of the index is an error.
include_patterns = ["*.md", "docs/*.md", "launch/*.md", "notebooks/*.md", "benchmarks/*.md"]
exclude_patterns = [".*", "build", "dist", "runs", "ddp_profiler", "tests", "**/node_modules"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_heading_anchors = 4  # as GitHub makes them
# "--dp" must not become a dash, and quotes in text are those of the code they speak of.
smartquotes = False
# Transcripts and formulas are in no language.
highlight_language = "none"

autodoc_member_order = "groupwise"
autodoc_typehints = "description"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "ddp_profiler"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "to_index.html"}
templates_path = ["_templates"]
html_show_copyright = False
html_show_sphinx = False
# The pages are served and opened from disk as they are: nothing comes from the network.
html_copy_source = False
html_show_sourcelink = False

# Only for `make docs-links`.
linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]  # made by scripts there

_GROUP = re.compile(r"^## (.+)$", re.MULTILINE)
_PAGE = re.compile(r"^- \[([^\]]+)\]\(([^)#]+)\.md\)", re.MULTILINE)


def _add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Makes the navigation of the index's own lists, so that they are written once.

    Each heading of docs/index.md is a group, each item that begins with a link a page of it.
    """
    if page != root_doc:
        return
    parts = _GROUP.split(source[0])
    for group, text in zip(parts[1::2], parts[2::2], strict=True):
        pages = "\n".join(f"{title} <{target}>" for title, target in _PAGE.findall(text))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {group}\n\n{pages}\n```\n"


def _remove_links_to_folders(app: Sphinx, page: str, source: list[str]) -> None:
    """Lets links to folders be text: a site has no page for them, and GitHub has."""
    folder = Path(app.srcdir, page).parent

    def text_of(link: re.Match[str]) -> str:
        return link[1] if (folder / link[2]).is_dir() else link[0]

    source[0] = re.sub(r"\[([^\]]+)\]\(([\w./-]+/)\)", text_of, source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_navigation)
    app.connect("source-read", _remove_links_to_folders)
