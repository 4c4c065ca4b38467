"""Broken traces: file, byte, cause and remedy; lenient repairs give the sound file's result."""

import gzip
import json
import re
import zlib

import pytest

from ddp_profiler.errors import InputError
from ddp_profiler.trace import reader, repair, source
from ddp_profiler.trace.reader import read_trace

from .kineto import ALL_REDUCE, Recording, training

NAME = "aten::conv2d of block 7"


@pytest.fixture(params=["indented", "compact"])
def sound(request):
    """A sound trace's text, in Kineto's layout or in one line, with a name to be broken."""
    made, _ = training(3, steps=2)
    made.event("cpu_op", NAME, 500, 700, **{"External id": 7, "Call stack": NAME})
    for n in range(300):
        made.event("cpu_op", "aten::add", 1000 + n, 5)
    return made.text(indent=2 if request.param == "indented" else None)


def same(one, other):
    """Whether two traces tell the same."""
    return (
        one.gpu.begin_ns[:].tolist() == other.gpu.begin_ns[:].tolist()
        and one.gpu.end_ns[:].tolist() == other.gpu.end_ns[:].tolist()
        and one.gpu.work.tolist() == other.gpu.work.tolist()
        and one.marks == other.marks
        and one.launches.begin_ns[:].tolist() == other.launches.begin_ns[:].tolist()
        and (one.rank, one.world_size) == (other.rank, other.world_size)
    )


def counts(trace):
    return {warning.code: warning.count for warning in trace.warnings}


BREAKS = {
    "quote": (b'aten::conv2d of "block" 7', "a quote stands unescaped", {"repaired_quote": 2}),
    "one quote": (b'aten::conv2d of block 7"', "a quote stands unescaped", {"repaired_quote": 1}),
    "quote and comma": (b'f("a", "b")', "a quote stands unescaped", {"repaired_quote": 4}),
    "backslash": (b"C:\\dir\\data", "a lone backslash stands", {"repaired_backslash": 2}),
    "backslash at the end": (b"C:\\", "a lone backslash stands", {"repaired_backslash": 1}),
    "control byte": (b"aten\x01::\x1b[31m", "a control byte stands", {"repaired_control_byte": 2}),
    "line break": (b"aten\n::x", "a control byte stands", {"repaired_control_byte": 1}),
    "encoding": (b"aten\xff\xfe::x", "a byte that is not UTF-8", {"repaired_encoding": 2}),
    "half a pair": (b"aten\\ud800::x", "a byte that is not UTF-8", {"repaired_encoding": 1}),
}


@pytest.mark.parametrize("how", BREAKS)
def test_broken_names(how, sound, tmp_path):
    name, cause, expected = BREAKS[how]
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_bytes(sound)
    broken = sound.replace(b'"name": "' + NAME.encode() + b'"', b'"name": "' + name + b'"')
    assert broken != sound
    bad.write_bytes(broken)
    with pytest.raises(InputError) as caught:
        read_trace(bad)
    message = caught.value.message
    assert message.startswith(f"{bad} is no JSON at byte ")
    assert cause in message
    assert "--lenient" in caught.value.remedy
    assert len(str(caught.value).splitlines()) == 2
    byte = int(message.partition("at byte ")[2].partition(":")[0].replace(",", ""))
    at = broken.index(name)
    assert at - 12 <= byte <= at + len(name)
    found = read_trace(bad, lenient=True)
    assert counts(found) == expected
    assert same(found, read_trace(good))


def test_several_mistakes_are_counted_by_kind(sound, tmp_path):
    bad, good = tmp_path / "bad.json", tmp_path / "good.json"
    good.write_bytes(sound)
    broken = sound.replace(b"aten::add", b'aten::"add"', 5)
    broken = broken.replace(b'"' + NAME.encode() + b'"', b'"x\x02\\q \xff"', 1)
    bad.write_bytes(broken)
    found = read_trace(bad, lenient=True)
    assert counts(found) == {
        "repaired_quote": 10,
        "repaired_control_byte": 1,
        "repaired_backslash": 1,
        "repaired_encoding": 1,
    }
    assert same(found, read_trace(good))


def test_numbers_that_json_does_not_have(tmp_path):
    made = Recording()
    made.comm(0, 100)
    text = made.text().replace(b'"device": 0', b'"bandwidth": inf, "more": -NaN, "device": 0')
    path = tmp_path / "t.json"
    path.write_bytes(text)
    with pytest.raises(InputError, match="NaN or Infinity stands where"):
        read_trace(path)
    found = read_trace(path, lenient=True)
    assert counts(found) == {"repaired_number": 2}
    assert len(found.gpu) == 1


def test_an_event_beyond_repair_is_left_out_and_counted(sound, tmp_path):
    bad, good = tmp_path / "bad.json", tmp_path / "good.json"
    good.write_bytes(sound)
    bad.write_bytes(sound.replace(b'"dur": 0.700', b'"dur": 0.7.1.2'))
    with pytest.raises(InputError, match=r"has an event at byte .* that is no JSON"):
        read_trace(bad)
    found = read_trace(bad, lenient=True)
    assert counts(found) == {"dropped_unreadable": 1}
    assert same(found, read_trace(good))


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("at", [0.1, 0.25, 0.5, 0.75, 0.9])
def test_a_hole_of_zero_bytes_is_refused(lenient, at, sound, tmp_path):
    path = tmp_path / "t.json"
    begin, size = int(len(sound) * at), 700
    path.write_bytes(sound[:begin] + b"\0" * size + sound[begin + size :])
    with pytest.raises(InputError) as caught:
        read_trace(path, lenient=lenient)
    assert f"has a hole of 700 zero bytes at byte {begin:,}:" in caught.value.message


def test_control_bytes_outside_of_names_are_not_repaired(sound, tmp_path):
    path = tmp_path / "t.json"
    # With blanks there it would be an event without a duration, which is no work.
    begin, end = next(re.finditer(rb',\s*"dur": [\d.]+', sound)).span()
    path.write_bytes(sound[:begin] + b"\x01" * (end - begin) + sound[end:])
    assert counts(read_trace(path, lenient=True)) == {"dropped_unreadable": 1}


def test_a_name_never_takes_in_what_follows_it(tmp_path):
    made = Recording()
    for place in range(4):
        made.kernel(place * 100, 10, f"kernel{place}")
    text = made.text()
    begin, end = text.index(b"kernel1") + 4, text.index(b"ts", text.index(b"kernel1"))
    path = tmp_path / "t.json"
    path.write_bytes(text[:begin] + text[end:])
    found = read_trace(path, lenient=True)
    assert counts(found) == {"dropped_unreadable": 1}
    assert found.names == ("kernel0", "kernel2", "kernel3")


def test_bytes_of_packed_files_are_of_the_unpacked_text(sound, tmp_path):
    broken = sound.replace(NAME.encode(), b'a "b"', 1)
    messages = []
    for name, data in (("t.json", broken), ("t.json.gz", gzip.compress(broken))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError) as caught:
            read_trace(tmp_path / name)
        messages.append(caught.value.message.replace("t.json.gz", "t.json"))
    plain, packed = messages
    byte = plain.partition("at byte ")[2].partition(":")[0]
    assert packed == plain.replace(f"byte {byte}", f"byte {byte} of the unpacked text")


def test_sound_names_are_never_changed(tmp_path):
    names = ['say \\"hi\\"', "C:\\\\x", "a\\u00e9\\ud83d\\ude00", '},{\\"ph\\": \\"X\\"', "\u6f22"]
    made = Recording()
    for place, _ in enumerate(names):
        made.kernel(place * 100, 10, f"name{place}")
    made.event("cpu_op", "BROKEN", 0, 10)
    text = made.text()
    for place, name in enumerate(names):
        text = text.replace(f"name{place}".encode(), name.encode())
    path = tmp_path / "t.json"
    path.write_bytes(text.replace(b"BROKEN", b'a "b"'))
    found = read_trace(path, lenient=True)
    assert found.names == tuple(json.loads(f'"{name}"') for name in names)
    assert counts(found) == {"repaired_quote": 2}


def test_mend_changes_nothing_it_need_not():
    event = b'{"ph": "X", "name": "a \\" b", "args": {"s": "x \x07 y", "n": "p \\\\ q"}}'
    mended = repair.mend(event)
    assert mended is not None
    assert mended.text == event.replace(b"\x07", "\ufffd".encode())
    assert (mended.repairs, mended.position) == ({"repaired_control_byte": 1}, event.index(b"\x07"))


# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("key", ["a", "args"])
@pytest.mark.parametrize("end", ["]}", ", {}]}"])
def test_deep_nesting_is_an_error(lenient, key, end, tmp_path):
    path = tmp_path / "t.json"
    deep = "[" * 200_000 + "]" * 200_000
    path.write_text('{"traceEvents": [{"ph": "X"}, {"%s": {"x": %s}}%s' % (key, deep, end))  # noqa: UP031
    with pytest.raises(InputError, match=r"nested too deeply"):
        read_trace(path, lenient=lenient)


def test_an_empty_file(tmp_path):
    path = tmp_path / "t.json.gz"
    for data in (b"", gzip.compress(b"")):
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"t\.json\.gz (is empty|holds no JSON)"):
            read_trace(path)


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(InputError, match=r"Cannot read .*No such file"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"Cannot read .*directory"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("t.json.gz", b"hello world", "is not gzip, though its name says so"),
        ("t.json", b"PK\x03\x04....", "is a zip archive"),
        ("t.json", b"\x28\xb5\x2f\xfd....", "is compressed with zstd"),
        ("t.json", b"SQLite format 3\x00", "is an SQLite database"),
        ("t.json", b"\x0a\x00\x01\x02", "is a binary file"),
        ("t.json", b"name,ts\na,1\n", "is no JSON"),
    ],
)
def test_other_formats_are_named(name, data, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        read_trace(path, lenient=True)
    assert caught.value.remedy


def test_json_that_is_no_trace(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"rank": 3}')
    with pytest.raises(reader.NoTraceError, match="holds no traceEvents"):
        read_trace(path)


UNPACKERS = pytest.mark.parametrize("fast", [True, False], ids=["isal", "zlib"])


@pytest.fixture
def unpacker(fast, monkeypatch):
    if fast:
        pytest.importorskip("isal", reason="isal has no wheel for this platform")
    else:
        monkeypatch.setattr(source, "_fast", None)


@UNPACKERS
@pytest.mark.usefixtures("unpacker")
def test_the_content_decides_whether_it_is_gzip(sound, tmp_path):
    plain, packed, parts = (tmp_path / n for n in ("a.json.gz", "b.json", "c.json"))
    plain.write_bytes(sound)
    packed.write_bytes(gzip.compress(sound))
    # Several streams, one empty, filled up with zeros as on tape.
    cut = len(sound) // 3
    streams = [gzip.compress(sound[:cut]), gzip.compress(b""), gzip.compress(sound[cut:])]
    parts.write_bytes(b"".join(streams) + b"\0" * 700)
    first = read_trace(plain)
    assert same(first, read_trace(packed))
    assert same(first, read_trace(parts))


@UNPACKERS
@pytest.mark.usefixtures("unpacker")
def test_gzip_that_is_cut(sound, tmp_path):
    path = tmp_path / "t.json.gz"
    whole = gzip.compress(sound)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert f"its gzip data ends at byte {len(whole) // 2:,} of the file" in caught.value.message
    found = read_trace(path, lenient=True)
    assert counts(found) == {"repaired_cut": 1}
    assert found.cut
    # All text is there, but not the sum that would prove it.
    path.write_bytes(whole[:-4])
    with pytest.raises(InputError, match="is cut: its gzip data ends"):
        read_trace(path)


@UNPACKERS
@pytest.mark.usefixtures("unpacker")
@pytest.mark.parametrize("lenient", [False, True])
def test_gzip_that_is_damaged_is_never_used(lenient, sound, tmp_path):
    path = tmp_path / "t.json.gz"
    # Stored, not packed: the damage shows in the checksum only.
    packer = zlib.compressobj(level=0, wbits=31)
    whole = packer.compress(sound) + packer.flush()
    at = whole.index(b"aten::conv2d")
    path.write_bytes(whole[:at] + b"b" + whole[at + 1 :])
    with pytest.raises(InputError, match="damaged: its gzip data is invalid near byte"):
        read_trace(path, lenient=lenient)
    # A block of a kind that there is not.
    path.write_bytes(gzip.compress(sound)[:10] + b"\xff" * 300)
    with pytest.raises(InputError, match="damaged: its gzip data is invalid near byte"):
        read_trace(path, lenient=lenient)


@UNPACKERS
@pytest.mark.usefixtures("unpacker")
def test_bytes_after_gzip(sound, tmp_path):
    path = tmp_path / "t.json.gz"
    whole = gzip.compress(sound)
    path.write_bytes(whole + b"more")
    with pytest.raises(InputError, match=f"4 bytes that are not gzip.*from byte {len(whole):,} on"):
        read_trace(path)


@UNPACKERS
@pytest.mark.usefixtures("unpacker")
@pytest.mark.parametrize("filling", [b" ", b"x"])
def test_a_gzip_bomb_stops_at_the_limit(filling, tmp_path):
    path = tmp_path / "t.json.gz"
    head = b'{"traceEvents": [' if filling == b" " else b'{"traceEvents": [{"name": "'
    packer = zlib.compressobj(wbits=31)
    data = packer.compress(head)
    for _ in range(8):
        data += packer.compress(filling * (1 << 20))
    path.write_bytes(data + packer.flush())
    assert path.stat().st_size < 20_000
    read = []
    with pytest.raises(InputError, match="unpacks to more than 4,000,000 bytes") as caught:
        read_trace(path, limit_bytes=4_000_000, progress=read.append)
    assert "--max-unpacked-gb" in caught.value.remedy


# ----------------------------------------------------------------------------------------------


def test_several_traces_in_one_file(sound, tmp_path):
    path = tmp_path / "t.json"
    cut = sound.index(b'"aten::add"')
    begin = sound.rindex(b"{", 0, sound.rindex(b'"ph"', 0, cut))
    interleaved = sound[:begin] + sound + sound[begin:]
    for text in (sound + sound, interleaved, sound[: len(sound) // 2] + sound):
        path.write_bytes(text)
        for lenient in (False, True):
            with pytest.raises(InputError, match="several processes wrote into one file") as caught:
                read_trace(path, lenient=lenient)
            assert "byte" in caught.value.message
            assert "file of its own" in caught.value.remedy


def test_events_of_several_processes(tmp_path):
    made = Recording()
    made.comm(0, 100, ALL_REDUCE, launched=-50)
    made.launch(10, pid=99)
    with pytest.raises(InputError, match=r"2 processes that launch GPU work.*pids 4711, 99"):
        read_trace(made.write(tmp_path / "t.json"))
    made = Recording()
    made.step(3, 0, 100)
    made.step(3, 20, 100, pid=99)
    with pytest.raises(InputError, match="2 processes"):
        read_trace(made.write(tmp_path / "t.json"))
