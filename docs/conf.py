"""Settings of the documentation's site: `make docs` builds it into build/docs."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]

project = "ddp_profiler"
copyright = "the authors of ddp_profiler, Apache-2.0"
_VERSION = (_ROOT / "ddp_profiler" / "_version.py").read_text()
release = re.findall(r'__version__ = "(.+)"', _VERSION)[0]

root_doc = "index"
extensions = ["myst_parser"]
exclude_patterns = ["examples"]
suppress_warnings: list[str] = []
nitpicky = True

# Links to headings are written as GitHub makes them.
myst_heading_anchors = 4
myst_enable_extensions: list[str] = []

html_theme = "furo"
html_title = f"ddp_profiler {release}"
# All that a page needs comes with it: no fonts or scripts from elsewhere.
html_show_sourcelink = False
html_copy_source = False
highlight_language = "text"

linkcheck_timeout = 20
linkcheck_retries = 2
# Anchors that pages make by script are not in what comes over the network.
linkcheck_anchors = False
