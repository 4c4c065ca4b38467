"""The array of events is cut between events only, whatever they hold."""

import json
import random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_profiler.errors import InputError
from ddp_profiler.trace import document
from ddp_profiler.trace.document import Document, Scan, scan
from ddp_profiler.trace.notices import Notices

# Machines are slow at times; nothing here is about time.
PATIENT = settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))

# Strings that look like what stands between events.
NASTY = st.sampled_from(
    ["},{", '"},{"', "\\", '\\"', "]}", '[{"ph":', "},\n  {", "a\\\\", "\u00e9\u6f22", "", ",", '"']
)
PLAIN = st.text('ab"\\{}[],: \u00e9\n\t0', max_size=5)
NAMES = st.lists(st.one_of(NASTY, PLAIN), max_size=4).map("".join)
VALUES = st.recursive(
    st.one_of(NAMES, st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)
EVENTS = st.lists(
    st.fixed_dictionaries({"name": NAMES}, optional={"args": VALUES, "ts": st.integers()}),
    max_size=12,
)
LAYOUTS = st.sampled_from(
    [{}, {"indent": 2}, {"separators": (",", ":")}, {"indent": 0, "separators": (" ,", " : ")}]
)


def read(text, *, piece=7, lenient=False, name="t.json"):
    """Reads a text in pieces; returns what was decoded, the document and its notices."""
    events = []
    notices = Notices()

    def decode(array):
        events.extend(msgspec.json.decode(array, type=list[dict]))

    pieces = (text[at : at + piece] for at in range(0, len(text), piece))
    found = Document(pieces, name, decode, notices, lenient=lenient)
    found.read()
    return events, found, {warning.code: warning.count for warning in notices.all()}


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(document, "PIECE_BYTES", 64)


@settings(PATIENT, max_examples=20)
@given(EVENTS, LAYOUTS, st.booleans())
def test_scan_finds_the_boundaries(events, layout, ascii_only):
    inside = json.dumps(events, ensure_ascii=ascii_only, **layout).encode()[1:]
    assert scan(inside).end == len(inside) - 1
    # Every prefix: what is before the boundary are whole events.
    places = {scan(inside[:end]).boundary for end in range(len(inside))}
    for place in places - {-1}:
        whole = json.loads(b"[" + inside[:place] + b"]")
        assert whole == events[: len(whole)]
    assert len(places - {-1}) == max(0, len(events) - 1)


def test_scan_stops_at_what_is_no_array():
    assert scan(b'{"a": 1}}') == Scan(-1, -1)
    assert scan(b'"cut') == Scan(-1, -1)


@PATIENT
@given(EVENTS, LAYOUTS, st.integers(1, 40), st.integers(20, 200), st.booleans(), VALUES)
def test_events_are_those_of_a_whole_read(events, layout, piece, target, first, more):
    root = {"traceEvents": events, "more": more} if first else {"more": more, "traceEvents": events}
    text = json.dumps(root, **layout).encode()
    before = document.PIECE_BYTES
    document.PIECE_BYTES = target
    try:
        found, read_document, notices = read(text, piece=piece)
    finally:
        document.PIECE_BYTES = before
    assert found == events
    assert json.loads(read_document.metadata["more"]) == more
    assert notices == {}


@PATIENT
@given(EVENTS, LAYOUTS)
def test_root_may_be_the_list_itself(events, layout):
    text = json.dumps(events, **layout).encode()
    found, read_document, _ = read(text)
    assert found == events
    assert read_document.is_list


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf", b"\n\n  "])
def test_byte_order_mark_and_blanks(prefix):
    found, _, _ = read(prefix + b'{"traceEvents": [{"name": "a"}]}\n\n ')
    assert found == [{"name": "a"}]


def test_no_events_are_an_empty_array_or_none():
    assert read(b'{"traceEvents": []}')[1].has_events
    assert read(b"[ ]")[1].has_events
    assert not read(b"{}")[1].has_events
    assert not read(b'{"traceEvents": null}')[1].has_events
    # Not at the top: no events of this trace.
    assert not read(b'{"other": {"traceEvents": [1]}}')[1].has_events


def test_events_longer_than_a_piece(small_pieces):
    events = [{"name": "x" * 5000}, {"name": "b"}, {"args": list(range(3000))}, {"name": "c"}]
    assert read(json.dumps({"traceEvents": events}).encode(), piece=50)[0] == events


def test_long_events_may_hold_what_looks_like_others(small_pieces):
    name = 'say }, {"name": "b", "ph": ' * 60
    events = [{"name": name, "args": [{"ph": 1}, {"name": name}]}, {"name": "c"}]
    for lenient in (False, True):
        text = json.dumps({"traceEvents": events}).encode()
        assert read(text, piece=50, lenient=lenient)[0] == events


def test_broken_text_without_known_keys_ends_soon(small_pieces):
    text = b'{"traceEvents": [' + b'{"k": "a "b" c", "l": "d"},' * 40_000 + b'{"k": 1}]}'
    with pytest.raises(InputError, match=r"byte 17 that is no JSON|is cut"):
        read(text, piece=1 << 16)


def test_values_too_long_to_keep_are_passed(monkeypatch, small_pieces):
    monkeypatch.setattr(document, "MAX_METADATA_BYTES", 1000)
    root = {"long": ["},{" * 9] * 500, "text": "y" * 5000, "rank": 3, "traceEvents": [{"a": 1}]}
    events, found, _ = read(json.dumps(root).encode(), piece=100)
    assert events == [{"a": 1}]
    assert set(found.metadata) == {"rank"}


@pytest.mark.usefixtures("small_pieces")
def test_one_event_without_an_end_stops_at_a_limit(monkeypatch):
    monkeypatch.setattr(document, "MAX_EVENT_BYTES", 10_000)
    with pytest.raises(InputError, match=r"event at byte 17 that is longer than"):
        read(b'{"traceEvents": [{"name": "' + b"x" * 100_000 + b'"}]}', piece=1000)


CUT = {"a": 1, "traceEvents": [{"name": "},{", "n": n} for n in range(40)], "z": {"b": [1]}}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("layout", [{}, {"indent": 2}])
def test_a_cut_is_told_with_its_byte_and_repaired_to_whole_events(layout):
    text = json.dumps(CUT, **layout).encode()
    ends, at = [], text.index(b"[") + 1
    for _ in CUT["traceEvents"]:
        at = text.index(b"{", at)
        at = json.JSONDecoder().raw_decode(text.decode(), at)[1]
        ends.append(at)
    lenient_events = set()
    for end in range(1, len(text)):
        cut = text[:end]
        with pytest.raises(InputError) as caught:
            read(cut, piece=100)
        assert f"cut: it ends at byte {end:,}" in caught.value.message, cut[-40:]
        assert "--lenient" in caught.value.remedy
        events, found, notices = read(cut, piece=100, lenient=True)
        assert notices == {"repaired_cut": 1}
        assert found.cut
        assert events == CUT["traceEvents"][: len(events)]
        # Nothing that is there whole is lost.
        assert len(events) == sum(whole <= end for whole in ends)
        lenient_events.add(len(events))
    assert lenient_events == set(range(41))


def test_text_after_the_end(small_pieces):
    good = b'{"traceEvents": [{"name": "a"}]}'
    with pytest.raises(InputError, match=r"goes on after its end, from byte 33 on"):
        read(good + b" x")
    assert read(good + b" x" * 99, lenient=True)[2] == {"ignored_trailing": 1}
    for lenient in (False, True):
        with pytest.raises(InputError, match=r"second trace from byte 33 on.*several processes"):
            read(good + b"\n" + good, lenient=lenient)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"   ", "holds no JSON"),
        (b"3", "holds no JSON object or list"),
        (b"{3: 4}", "byte 1: a key is missing"),
        (b'{"a" 4}', "byte 5: a colon is missing"),
        (b'{"a": 4 "b": 5}', "byte 8: a comma or closing bracket is missing"),
        (b'{"a": "x "y" z", "traceEvents": []}', "byte 10: a comma or closing bracket is missing"),
    ],
)
def test_broken_roots_name_the_byte(text, message):
    with pytest.raises(InputError, match=message):
        read(text)


def test_lenient_leaves_out_what_is_broken_behind_the_events(small_pieces):
    text = b'{"traceEvents": [{"name": "a"}], "name": "x "y" z", "rank": 3}'
    with pytest.raises(InputError, match="a comma or closing bracket is missing"):
        read(text)
    events, _, notices = read(text, lenient=True)
    assert (events, notices) == ([{"name": "a"}], {"ignored_trailing": 1})


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (b', "traceEvents": []}', "has traceEvents twice, the second at byte"),
        (b', "distributedInfo": {}, "distributedInfo": {"rank": 1}}', "has distributedInfo twice"),
        (b', "name": "x "y" z", "traceEvents": [{}]}', "has another trace within its events or"),
        (b'} x {"traceEvents": [{}]}', "has another trace within its events or after them"),
    ],
)
def test_lenient_leaves_out_no_other_trace(rest, message, small_pieces):
    with pytest.raises(InputError, match=message):
        read(b'{"traceEvents": [{"name": "a"}]' + rest, lenient=True)


def test_lenient_leaves_out_no_damaged_data(small_pieces):
    """What the source says of its data, such as a wrong checksum of gzip, is no broken text."""

    def pieces():
        yield b'{"traceEvents": [{"name": "a"}], "name": "' + 99 * b"x"
        raise InputError("t.json.gz is damaged.")

    document = Document(pieces(), "t.json", lambda array: None, Notices(), lenient=True)
    with pytest.raises(InputError, match="is damaged"):
        document.read()


def test_large_text_in_pieces_of_any_size():
    draw = random.Random(5)
    events = [
        {"ph": "X", "name": draw.choice(["},{", "aten::add", '"'] * 3) * 3, "args": {"n": n}}
        for n in range(20_000)
    ]
    text = json.dumps({"traceEvents": events}, indent=1).encode()
    for piece in (1 << 12, 99_991, 1 << 22):
        assert read(text, piece=piece)[0] == events
