"""The scanner that bounds hostile JSON before it is parsed, and the strict parser behind it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_loader.core import strict_json
from secure_loader.core.strict_json import MAX_LISTS, MAX_OBJECTS, Scanner, loads
from secure_loader.errors import FormatError


def verdict(*pieces: bytes, max_depth: int = 16) -> str:
    scanner = Scanner(max_depth=max_depth)
    try:
        for piece in pieces:
            scanner.feed(piece)
        scanner.finish()
    except FormatError as e:
        return e.message.split(" than")[0]
    return "ok"


SAMPLES = [
    b"{}",
    b'{"a":[1,2,{"b":"}{]["}],"c":"\\\\"}',
    b'{"a\\"]":"\\\\\\"[[","\\\\\\\\":[]}',
    b'{"unterminated":"x',
    b'{"a":"\\',
    b"[[[]]",
    b"[]]",
    b"][",
    b"[]][[]",
    b"[" * 16 + b"]" * 16,
    b"[" * 17 + b"]" * 17,
    b"[{" * 12 + b"}]" * 12,  # 24 deep: pairs of both kinds vanish together
    b"[" * 9 + b"[]" * 5 + b"]" * 9 + b"[[[]]]",
    b"{" * 10 + b"}" * 10 + b"{" * 20 + b"}" * 20,
    b"[" * 10 + (b"[" * 6 + b"]" * 6) * 3 + b"]" * 10,
    b"[" * 10 + (b"[" * 7 + b"]" * 7) * 3 + b"]" * 10,
    b'"' + b"[" * 40 + b'"',
]


@pytest.mark.parametrize("text", SAMPLES)
def test_the_verdict_does_not_depend_on_where_pieces_end(text):
    whole = verdict(text)
    for cut in range(len(text) + 1):
        assert verdict(text[:cut], text[cut:]) == whole, cut
    assert verdict(*[text[i : i + 1] for i in range(len(text))]) == whole


@given(st.text('[]{}"\\x', max_size=40), st.lists(st.integers(0, 40), max_size=4), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_the_verdict_is_that_of_a_slow_scanner(text, cuts, max_depth):
    def slow() -> str:
        depth, string, i = 0, False, 0
        while i < len(text):
            c = text[i]
            if c == "\\":
                i += 2  # outside a string as well: the parser refuses it there
                if i > len(text):
                    return "incomplete"
                continue
            if c == '"':
                string = not string
            elif not string and c in "[{":
                depth += 1
                if depth > max_depth:
                    return "deep"
            elif not string and c in "]}":
                depth -= 1
                if depth < 0:
                    return "closes"
            i += 1
        return "incomplete" if depth or string else "ok"

    raw = text.encode()
    bounds = [0, *sorted(min(c, len(raw)) for c in cuts), len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(bounds)]
    # An escape of anything but a quote or backslash is one character here as there; both skip or keep "x".
    if "\\[" in text or "\\]" in text or "\\{" in text or "\\}" in text:
        return
    expected = slow()
    assert (verdict(*pieces, max_depth=max_depth) == "ok") == (expected == "ok")
    assert (verdict(raw, max_depth=max_depth) == "ok") == (expected == "ok")


def test_sixteen_levels_are_allowed_and_seventeen_are_not():
    assert loads(b"[" * 16 + b"]" * 16, what="x", scan=True) is not None
    with pytest.raises(FormatError, match="the x is nested deeper than 16 levels"):
        loads(b"[" * 17 + b"]" * 17, what="x", scan=True)


@pytest.mark.parametrize(("container", "limit"), [(b"{}", MAX_OBJECTS), (b"[]", MAX_LISTS)])
def test_containers_are_counted_over_all_pieces(container, limit):
    scanner = Scanner()
    scanner.feed(b"[" if container == b"{}" else b"{")
    scanner.feed(container * (limit - 1))
    scanner.feed(container)
    with pytest.raises(FormatError, match="too many objects and lists"):
        scanner.feed(container)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":1,"a":1}', "has the key 'a' twice"),
        (b'{"a":{"b":1,"c":2,"b":3}}', "has the key 'b' twice"),
        (b'{"a":1,"\\u0061":2}', "has the key 'a' twice"),
        (b"[1.5]", "'1.5', which is not a whole number"),
        (b"[1e3]", "'1e3', which is not a whole number"),
        (b"[NaN]", "'NaN', which is not a whole number"),
        (b"[-Infinity]", "'-Infinity', which is not a whole number"),
        (b"[-1]", "a number out of range: -1"),
        (b"[-0]", "a number out of range: -0"),
        (b"[9223372036854775808]", "a number out of range"),
        (b"[" + b"9" * 5000 + b"]", "a number out of range"),
        (b'["\\ud800"]', "not valid UTF-8"),
        (b'{"\\udfff":1}', "not valid UTF-8"),
        (b'["\xff"]', "not valid UTF-8"),
        (b'["\xed\xa0\x80"]', "not valid UTF-8"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'["\n"]', "not valid JSON"),
        (b"[1,]", "not valid JSON"),
        (b"[01]", "not valid JSON"),
        (b"{'a':1}", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"{}{}", "not valid JSON"),
        (b"[", "not complete JSON"),
    ],
)
def test_what_is_refused_and_how_it_says_so(text, message):
    with pytest.raises(FormatError, match="the thing ") as caught:
        loads(text, what="thing", scan=True)
    assert message in caught.value.message


def test_what_is_allowed():
    assert loads(b'{"\\u00e9":[9223372036854775807,0,true,null,"\\ud83d\\ude00"]}', what="x") == {
        "é": [2**63 - 1, 0, True, None, "😀"]
    }
    assert loads(b"[1.5,-2,1e3]", what="x", any_number=True) == [1.5, -2, 1000.0]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(0, 2**63 - 1) | st.text(),
        lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(), c, max_size=3),
        max_leaves=8,
    )
)
def test_what_we_write_we_read(doc):
    text = strict_json.dumps(doc)
    assert loads(text, what="x", scan=True) == doc == json.loads(text)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, True), (2**63 - 1, True), (2**63, False), (-1, False), (True, False), (1.0, False), ("1", False)],
)
def test_what_counts_as_a_count(value, expected):
    assert strict_json.is_count(value) is expected


def scanned(text: bytes, size: int) -> Scanner:
    scanner = Scanner()
    for start in range(0, len(text), size):
        scanner.feed(text[start : start + size])
    scanner.finish()
    return scanner


SPELLINGS = st.lists(
    st.sampled_from(
        [*'{}[]:," \\\n', '"a"', '"b":', "0", "-", "17", '\\"', "\\\\", "\\n", "\\u0041", "\\/", "é", "true"]
    ),
    max_size=12,
).map(lambda parts: f'{{"x":[{"".join(parts)}]}}'.encode())


@given(SPELLINGS | st.text('{}[]:," \\na1', max_size=20).map(str.encode), st.integers(1, 7))
@settings(max_examples=500, deadline=None)
def test_what_is_proven_compact_has_no_other_spelling(text, size):
    try:
        scanner = scanned(text, size)
        doc = loads(text, what="x", scanned=scanner)
    except FormatError:
        with pytest.raises(FormatError):
            loads(text, what="x", scan=True)
        return
    assert doc == loads(text, what="x", scan=True)
    written = strict_json.dumps(doc, sort_keys=False).encode()
    if scanner.is_compact():
        assert written == text
    elif written == text:
        assert b"\\" in text


@pytest.mark.parametrize(
    ("text", "compact"), [(b'{"a":"\\"\\\\ x"}', True), (b'{"a" :1}', False), (b'{"a":"\\u0061"}', False)]
)
@pytest.mark.parametrize("padding", [0, 3])
def test_padding_does_not_count_as_a_blank(text, compact, padding):
    scanner = scanned(text + b" " * padding, 5)
    assert scanner.is_compact(padding) is compact
    assert not scanner.is_compact(padding + 2)


@given(st.integers(0, 2**64) | st.just(2**63) | st.just(2**63 - 1), st.sampled_from(["", "-"]), st.integers(1, 30))
def test_large_numbers_and_signs_are_seen_across_pieces(number, sign, size):
    text = f'[1,"a",{sign}{number},2]'.encode()
    scanner = scanned(text, size)
    assert scanner.odd_numbers or (not sign and number <= strict_json.MAX_INT)
    if sign or number > strict_json.MAX_INT:
        with pytest.raises(FormatError, match="out of range"):
            loads(text, what="x", scanned=scanner)
    else:
        assert loads(text, what="x", scanned=scanner) == [1, "a", number, 2]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("nbytes", [10, 10 << 20])
def test_the_collector_is_left_as_it_was(enabled, nbytes):
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with contextlib.suppress(KeyError), strict_json.building(nbytes):
            during = gc.isenabled()
            raise KeyError
        assert during is (enabled and nbytes < 1 << 18)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
