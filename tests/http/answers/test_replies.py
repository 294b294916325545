"""What every route does alike."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megallm.http.answers.replies import check_model, json_reply, response_id, shortened, stream_reply
from megallm.http.errors import RequestError
from megallm.http.service import Service
from megallm.http.traffic import Traffic
from tests.http.serving import strict_json

pytestmark = pytest.mark.anyio

SERVICE = cast("Service", SimpleNamespace(model_names=("one", "other")))  # cast: it has the part that is used


class Nothing:
    """A source without frames."""

    async def next_frames(self) -> bytes | None:
        return None


async def test_json_has_no_infinity() -> None:
    """Strict parsers refuse it."""
    response = json_reply({"a": [math.inf, math.nan, 1.5]})
    body: Any = await response.get_data(as_text=False)
    assert strict_json(body) == {"a": [None, None, 1.5]}
    assert response.content_type == "application/json"


async def test_a_stream_has_no_time_limit_and_no_cache() -> None:
    """The framework would cut it after a minute, without a word."""
    with Traffic().open("a") as exchange:
        response = stream_reply(Nothing(), exchange)
    assert response.timeout is None
    assert response.headers["cache-control"] == "no-cache"
    assert response.content_type == "text/event-stream; charset=utf-8"


@pytest.mark.parametrize("name", [None, "", "one", "other"])
def test_served_names_and_none_are_taken(name: str | None) -> None:
    """Who names no model means the one there is."""
    check_model(SERVICE, name)


def test_another_name_is_404() -> None:
    """With those that are served."""
    with pytest.raises(RequestError, match="one, other") as caught:
        check_model(SERVICE, "x")
    assert (caught.value.http_status, caught.value.code) == (404, "model_not_found")


def test_ids_differ_and_long_names_are_cut() -> None:
    """An error repeats no megabyte."""
    assert response_id("cmpl") != response_id("cmpl")
    assert response_id("cmpl").startswith("cmpl-")
    assert (shortened("x" * 10), len(shortened("x" * 1000))) == ("x" * 10, 203)
