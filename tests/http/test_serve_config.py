"""ServeConfig: what can't be served is refused when it is written, and the socket is what was asked for."""

import socket
from typing import Any

import pytest

from megallm import ServeConfig
from megallm.http.serve_config import port_of


def test_the_defaults_are_upstreams() -> None:
    """Swapping the import is all a script needs."""
    config = ServeConfig()
    assert config.host == "0.0.0.0"  # noqa: S104 - not bound here
    assert (config.port, config.frontend_replicas, config.verbose) == (5000, 4, False)
    assert list(config.parsers) == []
    assert (config.default_temperature, config.default_top_p, config.default_top_k) == (1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"port": -1}, "port is -1; it must be between 0 and 65,535"),
        ({"port": 65_536}, "port is 65536"),
        ({"frontend_replicas": -1}, "frontend_replicas is -1"),
        ({"drain_timeout_s": -0.5}, "drain_timeout_s is -0.5; it must be at least 0"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0"),
        ({"default_temperature": -1}, "default_temperature is -1"),
        ({"default_top_p": 1.5}, "default_top_p is 1.5; it must be between 0 and 1"),
        ({"default_top_k": -1}, "default_top_k is -1"),
        ({"parsers": ["no-such"]}, "parser 'no-such' is unknown; known are .*hermes"),
        ({"model_name": ""}, "model_name is empty"),
        ({"api_key": ""}, "api_key is empty"),
    ],
)
def test_a_value_that_can_not_be_served_is_refused(fields: dict[str, Any], said: str) -> None:
    """It would else show itself with the first request."""
    with pytest.raises(ValueError, match=said):
        ServeConfig(**fields)


def test_a_key_is_not_shown() -> None:
    """Configurations are logged."""
    assert "secret" not in repr(ServeConfig(api_key="secret"))


def test_the_app_is_told_what_was_configured() -> None:
    """A field that is lost on the way is a default that nobody asked for."""
    settings = ServeConfig(
        model_name="m",
        api_key="k",
        parsers=["hermes"],
        verbose=True,
        cors_origins=["*"],
        default_temperature=0.5,
        default_top_p=0.9,
        default_top_k=7,
        max_body_bytes=1000,
        tracing=True,
    ).app_settings()
    assert settings.is_traced
    assert (settings.model_name, settings.api_key, settings.parsers) == ("m", "k", ("hermes",))
    assert (settings.verbose, settings.cors_origins, settings.bounds.max_body_bytes) == (True, ("*",), 1000)
    sampling = (settings.default_temperature, settings.default_top_p, settings.default_top_k)
    assert sampling == (0.5, 0.9, 7)


def test_a_field_without_effect_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that was asked for is dropped silently."""
    ServeConfig(eval_mode=True).app_settings()
    assert "eval_mode set, without effect" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", ""])
def test_a_free_port_is_chosen_and_listens(host: str) -> None:
    """Tests and notebooks take any; clients connect to the one that was chosen."""
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with ServeConfig(host=host, port=0).listen() as listener:
        assert port_of(listener) > 0
        socket.create_connection((host or "localhost", port_of(listener)), 10).close()


def test_a_port_in_use_is_named() -> None:
    """The first thing to go wrong when a server is started twice."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = port_of(taken)
        with pytest.raises(OSError, match=f"port {port} of 127.0.0.1 is in use; choose another, or 0"):
            ServeConfig(host="127.0.0.1", port=port).listen()


def test_an_address_of_another_machine_is_named() -> None:
    """So is a host's name that is misspelled."""
    with pytest.raises(OSError, match=r"can't listen on port 0 of 203\.0\.113\.1"):
        ServeConfig(host="203.0.113.1", port=0).listen()
    with pytest.raises(OSError, match="is no address of this machine"):
        ServeConfig(host="host.invalid", port=0).listen()


def test_a_socket_of_the_callers_is_used_and_stays_the_callers() -> None:
    """A supervisor may open the port before it gives up its privileges."""
    with socket.socket() as sock:
        with pytest.raises(ValueError, match="sock is not bound to a port"):
            ServeConfig(sock=sock)
        sock.bind(("127.0.0.1", 0))
        config = ServeConfig(sock=sock)
        with config.listen() as listener:
            assert port_of(listener) == port_of(sock)
            socket.create_connection(("127.0.0.1", port_of(sock)), 10).close()
        assert sock.fileno() >= 0
