"""The scanner that bounds hostile JSON before it is parsed, and the strict parser behind it."""

from __future__ import annotations

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
