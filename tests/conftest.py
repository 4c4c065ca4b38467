"""Which tests may run beside others, and which must be alone on the machine."""

import pytest
from hypothesis import HealthCheck, settings

PARTS = ("beside", "alone")


# On a busy machine an example may take any time.
# The rest stays as Hypothesis has it, here and in CI.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        choices=PARTS,
        help="only tests that may run beside others (with -n 2), or only those marked 'alone'",
    )


# Last, so that marks that other conftest files add are there.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """A choice of its own and no -m, which a user's -m would replace."""
    part = config.getoption("--part")
    if part is None:
        return
    chosen, others = [], []
    for item in items:
        is_alone = any(item.get_closest_marker(name) for name in ("alone", "lab"))
        (chosen if is_alone == (part == "alone") else others).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=others)
