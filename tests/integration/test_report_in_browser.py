"""report.html in headless Chromium: wide and narrow, light and dark, printed.

With DDP_PROFILER_PICTURES=DIR in the environment, what was shown is kept there to be looked at.
"""

import os

import numpy as np
import pytest

from ddp_profiler.report.page.render import render
from tests.integration.headless import NAMES, Browser, find_browser
from tests.unit.report_runs import apart, hostile, many, script, study


def _many():
    work = 50 + np.random.default_rng(1).gamma(1.0, 2.0, (1024, 1000))
    work[777] += 20
    return many(work)


RUNS = {
    "study": lambda: study(late={3: 6.0}),
    "script": lambda: script(8, 5, 12.0, buckets=30),
    "one_rank": lambda: script(1, None),
    "withheld": lambda: script(3, ranks=apart(3)),
    "hostile": hostile,
    "many": _many,
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    path = find_browser()
    if path is None:
        if os.environ.get("CI") == "true" and os.geteuid() == 0:
            pytest.fail(f"CI must have one of {', '.join(NAMES)}.")
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    with Browser(path, str(tmp_path_factory.mktemp("profile"))) as found:
        yield found


def _shade(color):
    """Returns how bright a colour of a style is, 0 to 255."""
    return np.mean([float(part) for part in color.strip("rgb()").split(",")[:3]])


@pytest.mark.parametrize("name", RUNS)
def test_page(browser, tmp_path, name):
    loaded = RUNS[name]()
    html = render(loaded.summary, loaded.details, loaded.outlook)
    file = tmp_path / "report.html"
    file.write_text(html, encoding="utf-8")
    pictures = os.environ.get("DDP_PROFILER_PICTURES")

    def view(width, dark, printed=False):
        shown = "print" if printed else "dark" if dark else "light"
        kept = f"{pictures}/{name}-{width}-{shown}.png" if pictures else ""
        return browser.view(file.as_uri(), width, dark=dark, printed=printed, kept=kept)

    views = {
        (width, dark): view(width, dark)
        for width, dark in ((1280, False), (1280, True), (390, False), (360, True))
    }
    printed = view(700, True, printed=True)
    for (width, _), seen in {**views, (700, True): printed}.items():
        assert seen.problems == []
        assert seen.requests == [file.as_uri()]
        assert seen.inner == width
        assert seen.scroll <= width
        assert seen.wide == []
        assert seen.text > 1000
        assert abs(_shade(seen.background) - _shade(seen.color)) > 150
    light, dark = views[1280, False], views[1280, True]
    assert light.drawn == dark.drawn > 3
    assert _shade(light.background) > 200
    assert _shade(dark.background) < 60
    # Paper is light, whatever the screen is.
    assert _shade(printed.background) > 200


def test_it_sees_what_is_wrong(browser, tmp_path):
    """A page with the mistakes that the test above looks for."""
    file = tmp_path / "wrong.html"
    file.write_text(
        "<body><div style='width:500px'>wide</div><img src='missing.png'>"
        "<script>console.error('x'); missing()</script>"
    )
    view = browser.view(file.as_uri(), 390, dark=False)
    assert view.scroll > 390
    assert view.wide
    assert len(view.requests) == 2
    assert {event["method"] for event in view.problems} == {
        "Runtime.exceptionThrown",
        "Runtime.consoleAPICalled",
        "Log.entryAdded",
    }
