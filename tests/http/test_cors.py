"""Which web pages may call."""

import pytest

from megallm.http.cors import cors_headers, is_preflight, preflight_headers

ORIGIN = "https://page.example"
ASKING = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_a_named_origin_may_read() -> None:
    """And caches know that another one may not."""
    headers = cors_headers(ORIGIN, (ORIGIN,))
    assert (headers["Access-Control-Allow-Origin"], headers["Vary"]) == (ORIGIN, "Origin")
    assert cors_headers(ORIGIN, ("*",))["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize("origins", [(), ("https://other.example",), ("https://page.example.evil",)])
def test_another_may_not(origins: tuple[str, ...]) -> None:
    """By default nobody may."""
    assert cors_headers(ORIGIN, origins) == {}
    assert preflight_headers(ASKING, origins) == {}


def test_no_origin_needs_none() -> None:
    """Programs are no pages."""
    assert cors_headers(None, ("*",)) == {}


def test_a_preflight_is_told_what_it_asked_for() -> None:
    """The key travels in a header that has to be allowed by name."""
    headers = preflight_headers(ASKING, (ORIGIN,))
    assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert "POST" in headers["Access-Control-Allow-Methods"]


def test_only_a_browsers_question_is_a_preflight() -> None:
    """It needs no key, so nothing else may pass for one."""
    assert is_preflight("OPTIONS", ASKING)
    assert not is_preflight("POST", ASKING)
    assert not is_preflight("OPTIONS", {"origin": ORIGIN})
