"""Bodies: strict JSON, and the path of what is wrong."""

import logging

import pytest
from msgspec import Struct

from megallm.http.bodies.body import MAX_SEEN, UnknownFields, decode
from megallm.http.errors import RequestError


class Inner(Struct):
    """A part of a body."""

    b: int


class Outer(Struct):
    """A body."""

    a: list[Inner]
    c: dict[int, float] = {}
    d: float | None = None


def fault(body: bytes) -> RequestError:
    """Gives the error of a body that has to be refused."""
    with pytest.raises(RequestError) as caught:
        decode(body, Outer, UnknownFields(), "/x")
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"a": [{"b": 1}, {"b": "x"}]}', "a[1].b"),
        (b'{"a": [{}]}', "a[0].b"),
        (b"{}", "a"),
        (b'{"a": 5}', "a"),
        (b'{"a": [], "c": {"x": 1}}', "c"),
        (b'{"a": [], "d": "1"}', "d"),
    ],
)
def test_the_path_of_the_fault_is_told(body: bytes, param: str) -> None:
    """A client of a large request has to find it."""
    error = fault(body)
    assert (error.param, error.http_status) == (param, 400)
    assert "`$" not in str(error)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"nul",
        b'{"a": [}',
        b"[]",
        b"5",
        b'{"a": [], "d": NaN}',
        b'{"a": [], "d": 1e999}',
        b'{"a": [], "d": ' + b"9" * 400 + b"}",
        b'{"a": ' + b"[" * 100_000,
        b'{"a": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": [], "x": "\\ud800"}',
    ],
    ids=lambda body: repr(body[:24]),
)
def test_whatever_is_no_such_json_is_refused_cleanly(body: bytes) -> None:
    """Never a 500, however odd."""
    assert fault(body).http_status == 400


def test_unknown_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """They may be a typing error; a million of them must fill neither the log nor the memory."""
    unknown = UnknownFields()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            decode(b'{"a": [], "temprature": 1, "user": "u"}', Outer, unknown, "/x")
        assert [record.getMessage() for record in caplog.records] == [
            "/x: field 'temprature' is unknown and ignored"
        ]
        unknown.note({f"f{at}" for at in range(2 * MAX_SEEN)}, "/x")
    assert len(caplog.records) == MAX_SEEN
