"""Renders the page and writes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from ddp_profiler.analysis.detail import LevelDetail
from ddp_profiler.analysis.results import Summary
from ddp_profiler.analysis.verdict import verdict
from ddp_profiler.predict.outlook import Outlook
from ddp_profiler.record import paths
from ddp_profiler.report.page import charts
from ddp_profiler.report.page.content import content
from ddp_profiler.report.page.markup import safe


def render(summary: Summary, details: Sequence[LevelDetail], outlook: Outlook) -> str:
    """Returns ``report.html``: one file that needs nothing else.

    All text is escaped, and control characters are made visible, whatever run.json and the
    record hold.

    Args:
        summary: A run's.
        details: Single steps of some of its levels.
        outlook: What more ranks would bring.
    """
    template, style = _template()
    return template.render(
        page=content(summary, details, outlook, verdict(summary)),
        version=summary.run.profiler_version,
        # Read from the package.
        style=Markup(style),
        patterns=charts.patterns(),
        swatch=charts.swatch,
    )


def save(summary: Summary, details: Sequence[LevelDetail], outlook: Outlook, folder: Path) -> Path:
    """Writes ``report.html`` into a run folder, as a whole or not at all; returns its path."""
    path = paths.report_file(folder)
    paths.write_whole(path, render(summary, details, outlook).encode())
    return path


@lru_cache(maxsize=1)
def _template() -> tuple[Template, str]:
    environment = Environment(
        loader=PackageLoader("ddp_profiler.report.page", "."),
        autoescape=True,
        finalize=safe,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    loader = environment.loader
    assert loader is not None
    style, _, _ = loader.get_source(environment, "report.css")
    return environment.get_template("report.html.j2"), style
