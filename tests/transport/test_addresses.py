"""Where ranks meet: what is listened on, what is refused, and what other machines would not reach."""

import logging
import socket
from typing import Any

import pytest

from megallm.core_async.transport.addresses import (
    LOOPBACK,
    address_towards,
    check_host,
    listening,
)


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "0", "::", "0:0::0"])  # noqa: S104 - that is the point
def test_a_wildcard_is_refused_at_construction(wildcard: str) -> None:
    """Ranks of other machines would be sent to themselves."""
    with pytest.raises(ValueError, match=f"^coordinator_host is {wildcard}, which is every address"):
        check_host(wildcard)


@pytest.mark.parametrize("host", [None, "node0", "10.0.0.1", "::1", "fe80::1%lo", ""])
def test_a_name_and_an_address_are_taken_without_a_look_up(host: str | None) -> None:
    """The start says what is wrong with one that is not known."""
    check_host(host)


@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost", "::1"])
def test_loopback_that_was_asked_for_is_not_remarked_on(
    host: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks of one machine need nothing else."""
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with caplog.at_level(logging.WARNING), listening(host, None) as listener:
        socket.create_connection(listener.getsockname()[:2], 10).close()
    assert caplog.text == ""


def test_a_name_that_is_loopback_here_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's installer writes such a line; the ranks of other machines look the name up elsewhere."""
    known = socket.getaddrinfo

    def look_up(host: str, *arguments: Any, **options: Any) -> Any:  # Any: the real one's
        return known("127.0.1.1" if host == "node0" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with caplog.at_level(logging.WARNING), listening("node0", None) as listener:
        assert listener.getsockname()[0] == "127.0.1.1"
    assert "coordinator_host node0 is 127.0.1.1 on this machine" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_is_taken_is_another_one_and_a_warning(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The last run may not have ended yet; the ranks are told where to come, so any port will do."""
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with listening(host, None) as taken:
        port: int = taken.getsockname()[1]
        with listening(host, port) as listener:
            assert listener.getsockname()[0] == host
            assert listener.getsockname()[1] != port
    assert f"coordinator_port {port} is taken" in caplog.text


def test_a_port_that_is_free_is_taken() -> None:
    """A firewall may let nothing else through."""
    with listening(None, None) as listener:
        port: int = listener.getsockname()[1]
    with listening(LOOPBACK, port) as listener:
        assert listener.getsockname() == (LOOPBACK, port)


def test_the_address_towards_a_host_is_one_of_this_machine() -> None:
    """Where ranks of another machine reach this one."""
    assert address_towards("127.0.0.1") == "127.0.0.1"
