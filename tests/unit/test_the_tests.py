"""What keeps the tests apart and lets timed ones look again."""

from types import SimpleNamespace

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.in_two_parts import main, verdict
from tests.integration.conftest import Finished, Looks, timed, unaborted


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([0, 5], 0),
        ([5, 0], 0),
        ([5, 5], 5),
        ([1, 0], 1),
        ([0, 1], 1),
        ([5, 1], 1),
        ([1, 5], 1),
        ([2], 2),
    ],
)
def test_code_of_both_parts(codes, code):
    assert verdict(codes) == code


@pytest.mark.parametrize(("codes", "calls"), [([0, 0], 2), ([1, 0], 2), ([5, 0], 2), ([2, 0], 1)])
def test_after_an_interrupt_nothing_follows(monkeypatch, codes, calls):
    started = []

    def call(argv):
        started.append(argv)
        return codes[len(started) - 1]

    monkeypatch.setattr("subprocess.call", call)
    assert main("3", "-k", "some words") == codes[0] % 5
    assert len(started) == calls
    assert all(argv[-2:] == ["-k", "some words"] for argv in started)
    assert [argv[argv.index("--part") + 1] for argv in started] == ["beside", "alone"][:calls]
    assert started[0][started[0].index("-n") + 1] == "3"


def test_every_test_is_in_exactly_one_part():
    marks = [(), ("distributed",), ("alone",), ("lab", "distributed"), ("lab", "alone")]
    items = [SimpleNamespace(name=m, get_closest_marker=lambda n, m=m: n in m) for m in marks]
    found = {}
    for part in ("beside", "alone", None):
        others = []
        config = SimpleNamespace(
            getoption=lambda _, part=part: part,
            hook=SimpleNamespace(pytest_deselected=lambda items, o=others: o.extend(items)),
        )
        chosen = list(items)
        pytest_collection_modifyitems(config, chosen)
        assert len(chosen) + len(others) == len(items)
        found[part] = [item.name for item in chosen]
    assert found == {"beside": marks[:2], "alone": marks[2:], None: marks}


def looks_of(values):
    """Looks at one value after the other; another one beyond them is an error."""
    return Looks(iter(values).__next__)


@timed
def is_small(value, limit):
    assert value < limit


def test_one_look_in_three_is_enough():
    looks = looks_of([9, 7, 3])
    is_small(value=looks, limit=5)
    assert looks.seen == [9, 7, 3]

    def is_large(value):
        assert value > 8

    # An earlier look may show what the last one does not; no further one is taken.
    looks.show(is_large)


def test_a_good_first_look_is_the_only_one():
    looks = looks_of([3])
    is_small(value=looks, limit=5)
    is_small(value=looks, limit=4)
    assert looks.seen == [3]


def test_what_is_always_wrong_fails_after_three_looks_in_all():
    looks = looks_of([9, 8, 7])
    for _ in range(2):
        with pytest.raises(AssertionError, match=r"7 < 5|8 < 5|9 < 5") as caught:
            is_small(value=looks, limit=5)
        assert caught.value.__notes__ == ["So in each of 3 looks."]
    assert looks.seen == [9, 8, 7]


def test_what_is_no_claim_that_fails_is_no_noise():
    looks = looks_of([1, 2, 3])
    with pytest.raises(ZeroDivisionError):
        looks.show(lambda value: value / 0)
    assert looks.seen == [1]


def test_a_claim_about_two_measurements_looks_at_both():
    one, other = looks_of([9, 3]), looks_of([8, 7, 4])

    def claim(both):
        assert sum(both) < 8

    Looks.show_both(one, other, claim)
    assert (one.seen, other.seen) == ([9, 3], [8, 7, 4])


ABORTED = Finished(1, "", "terminate called without an active exception\n... exitcode  : -6")


@pytest.mark.parametrize(
    ("ends", "last", "launches"),
    [
        ([Finished(0, "done", "")], 0, 1),
        ([ABORTED, ABORTED, Finished(0, "done", "")], 0, 3),
        ([ABORTED, Finished(7, "done", "")], 7, 2),
        # Neither another failure nor one that stays is passed over.
        ([Finished(1, "", "Signal 11")], 1, 1),
        ([ABORTED] * 9, 1, 5),
    ],
)
def test_only_a_launch_that_torch_aborts_is_made_again(ends, last, launches):
    made = iter(ends)
    assert unaborted(lambda: next(made)).code == last
    assert len(ends) - len(list(made)) == launches
