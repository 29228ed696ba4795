"""What an engine has to get right before it decides anything.

Each case is a name, a policy, an input as JSON text, and the value of ``data.model.allow`` as JSON, ``undefined`` or
``error``. Most stand for a way in which one engine or binding was seen to answer wrongly, and thereby to allow.
"""

from __future__ import annotations

Case = tuple[str, str, str, str]

_HEAD = "package model\nimport rego.v1\ndefault allow := false\n"
_WINDOW = (
    'start := time.parse_rfc3339_ns("2026-01-01T00:00:00Z")\nend := time.parse_rfc3339_ns("2027-01-01T00:00:00Z")\n'
    "now := time.parse_rfc3339_ns(input.x)\nallow if {\n\tnow >= start\n\tnow < end\n}"
)
_EVERY = 'allow if every x in input.x { x in {"a", "b"} }'
_SET = 'allow if {x | some x in input.x} == {"a", "b"}'
_WITHOUT_DEFAULT = "package model\nimport rego.v1\n"

# Rules below `default allow := false`, and inputs with what comes of them.
_RULES: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("true", "allow if input.x", (('{"x": true}', "true"), ('{"x": false}', "false"), ("{}", "false"))),
    ("null is there", "allow if input.x", (('{"x": null}', "true"),)),
    (
        "false is not there",
        "allow if not input.x",
        (('{"x": false}', "true"), ('{"x": true}', "false"), ("{}", "true")),
    ),
    ("null and not", "allow if not input.x", (('{"x": null}', "false"),)),
    ("zero is not false", "allow if input.x == false", (('{"x": false}', "true"), ('{"x": 0}', "false"))),
    ("null is null", "allow if input.x == null", (('{"x": null}', "true"), ('{"x": false}', "false"), ("{}", "false"))),
    ("types", "allow if is_number(input.x)", (('{"x": 1}', "true"), ('{"x": null}', "false"), ('{"x": "1"}', "false"))),
    ("boolean", "allow if is_boolean(input.x)", (('{"x": false}', "true"), ('{"x": 0.0}', "false"))),
    (
        "2^53",
        "allow if input.x == 9007199254740993",
        (('{"x": 9007199254740993}', "true"), ('{"x": 9007199254740992}', "false")),
    ),
    (
        "nanoseconds",
        "allow if input.x < 1798761600000000001",
        (('{"x": 1798761600000000000}', "true"), ('{"x": 1798761600000000001}', "false")),
    ),
    ("2^63 - 1", "allow if input.x == 9223372036854775806", (('{"x": 9223372036854775807}', "false"),)),
    (
        "time",
        _WINDOW,
        (
            ('{"x": "2025-12-31T23:59:59Z"}', "false"),
            ('{"x": "2026-01-01T00:00:00Z"}', "true"),
            ('{"x": "2026-12-31T23:59:59.999999999Z"}', "true"),
            ('{"x": "2027-01-01T00:00:00Z"}', "false"),
            ('{"x": "2027-01-01T00:30:00+01:00"}', "true"),
            ("{}", "false"),
        ),
    ),
    ("a time", 'allow if time.parse_rfc3339_ns("2027-01-01T00:00:00Z") == 1798761600000000000', (("{}", "true"),)),
    (
        "sets",
        _SET,
        (('{"x": ["b", "a", "a"]}', "true"), ('{"x": ["a"]}', "false"), ('{"x": ["a", "b", "c"]}', "false")),
    ),
    (
        "every",
        _EVERY,
        (('{"x": ["a", "b"]}', "true"), ('{"x": ["a", "c"]}', "false"), ('{"x": []}', "true"), ("{}", "false")),
    ),
    (
        "in",
        'allow if "a" in input.x',
        (('{"x": ["b", "a"]}', "true"), ('{"x": ["b"]}', "false"), ('{"x": null}', "false")),
    ),
    ("count", "allow if count(input.x) == 1", (('{"x": ["a"]}', "true"), ('{"x": []}', "false"))),
    ("text", 'allow if startswith(input.x, "a")', (('{"x": "ab"}', "true"), ('{"x": "ba"}', "false"))),
    ("pattern", 'allow if regex.match("^a+$", input.x)', (('{"x": "aa"}', "true"), ('{"x": "aab"}', "false"))),
    (
        "members",
        "allow if input.x[_].y == 1",
        (('{"x": [{"y": 2}, {"y": 1}]}', "true"), ('{"x": [{"y": 2}, {}]}', "false")),
    ),
    ("or", "allow if input.x == 1\nallow if input.x == 2", (('{"x": 2}', "true"), ('{"x": 3}', "false"))),
    ("else", "allow if { input.x == 1 } else := false if { true }", (('{"x": 1}', "true"), ('{"x": 2}', "false"))),
    ("helper", "allow if a\na if input.x\nb if not a", (('{"x": true}', "true"), ('{"x": false}', "false"))),
    ("function", "allow if f(input.x)\nf(x) if x > 2", (('{"x": 3}', "true"), ('{"x": 2}', "false"))),
    ("override", "allow if input.x with input.x as true", (('{"x": false}', "true"),)),
    (
        "conflict",
        "allow := true if input.x\nallow := false if input.x",
        (('{"x": true}', "error"), ('{"x": false}', "false")),
    ),
    ("circle", "allow if a\na if b\nb if a", (("{}", "error"),)),
    ("an unknown function", 'allow if made.up("x")', (("{}", "error"),)),
    ("division by zero", "allow if not 1 / input.x == 1", (('{"x": 0}', "error"),)),
    ("syntax", "allow = = true", (("{}", "error"),)),
    ("an unsafe variable", "allow if x == 1", (("{}", "error"),)),
)
_WHOLE: tuple[Case, ...] = (
    ("the one-liner", "package model\nallow = true", "{}", "true"),
    ("undefined", _WITHOUT_DEFAULT + "allow if input.x", '{"x": false}', "undefined"),
    ("conflicting values", _WITHOUT_DEFAULT + "allow := true\nallow := false", "{}", "error"),
    ("a number", _WITHOUT_DEFAULT + "allow := 1", "{}", "1"),
    ("a text", _WITHOUT_DEFAULT + 'allow := "true"', "{}", '"true"'),
    ("null", _WITHOUT_DEFAULT + "allow := null", "{}", "null"),
    ("a set", _WITHOUT_DEFAULT + "allow contains true", "{}", "[true]"),
    ("default true", _WITHOUT_DEFAULT + "default allow := true\nallow := false if input.x", '{"x": true}', "false"),
    ("another package", "package other\nallow = true", "{}", "error"),
    ("an empty text", "", "{}", "error"),
    ("the syntax of version 0", "package model\nallow { true }", "{}", "error"),
)

CORPUS: tuple[Case, ...] = (
    *((name, _HEAD + rules, given, value) for name, rules, pairs in _RULES for given, value in pairs),
    *_WHOLE,
)
