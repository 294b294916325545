"""ServeConfig: what `serve` is told; and what becomes of it, the socket and the app's settings."""

import errno
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from megallm.http.parsers.registry import check_parsers
from megallm.http.service import AppSettings, Bounds
from megallm.http.tracing import require_opentelemetry

log = logging.getLogger(__name__)

BACKLOG = 16_384
"""Connections that may wait to be accepted; the system may hold fewer (net.core.somaxconn)."""
MAX_PORT = 65_535


@dataclass(kw_only=True)
class ServeConfig:
    """How `MegatronLLM.serve` and `MegatronAsyncLLM.serve` serve. Fields down to `eval_mode` are upstream's.

    Checks every field when made. Raises: ValueError naming field, value and range; ImportError where
    `tracing` lacks its extra.
    """

    host: str = "0.0.0.0"  # noqa: S104 - upstream's default
    port: int = 5000
    """0 takes a free one; see the `port` of what `serve(blocking=False)` gives."""
    parsers: Sequence[str] = ()
    """Parsers of the output, in the order they are applied; see `http/parsers/registry.py`."""
    verbose: bool = False
    """Log each request."""
    frontend_replicas: int = 4
    """Processes that tokenise, detokenise and write JSON. 0: all of that in the engine's own loop."""
    sock: socket.socket | None = field(default=None, repr=False)
    """A bound socket, in place of `host` and `port`; stays the caller's."""
    default_temperature: float = 1.0
    """Of requests that name none; so are the next two."""
    default_top_p: float = 1.0
    default_top_k: int = 0
    eval_mode: bool = False
    """Has no meaning here: what upstream does then, megallm always does."""
    model_name: str = "megallm"
    """The name that requests and responses give the model."""
    api_key: str | None = field(default=None, repr=False)
    """What requests must bring along, but for /health."""
    drain_timeout_s: float = 30.0
    """What is under way may take so long when the server stops."""
    max_body_bytes: int = 32 << 20
    """Of a request."""
    cors_origins: Sequence[str] = ()
    """Origins that pages may call from; "*" is any."""
    tracing: bool = False
    """Make an OpenTelemetry span of each request; needs the extra `otel`. See `http/tracing.py`."""

    def __post_init__(self) -> None:
        check_parsers(self.parsers)
        _within("port", self.port, 0, MAX_PORT)
        _within("frontend_replicas", self.frontend_replicas, 0, 1024)
        _within("drain_timeout_s", self.drain_timeout_s, 0, None)
        _within("max_body_bytes", self.max_body_bytes, 1, None)
        _within("default_temperature", self.default_temperature, 0, None)
        _within("default_top_p", self.default_top_p, 0, 1)
        _within("default_top_k", self.default_top_k, 0, None)
        if self.sock is not None and port_of(self.sock) == 0:
            raise ValueError("ServeConfig.sock is not bound to a port; bind it first, or leave it out")
        if not self.model_name:
            raise ValueError("ServeConfig.model_name is empty; give a name, or leave it out")
        if self.api_key is not None and not self.api_key:
            raise ValueError("ServeConfig.api_key is empty; give a key, or leave it out to serve everybody")
        if self.tracing:
            require_opentelemetry()

    def app_settings(self) -> AppSettings:
        """Gives what the app is told."""
        if self.eval_mode:
            log.warning("ServeConfig: eval_mode set, without effect")
        return AppSettings(
            model_name=self.model_name,
            api_key=self.api_key,
            parsers=tuple(self.parsers),
            verbose=self.verbose,
            is_traced=self.tracing,
            cors_origins=tuple(self.cors_origins),
            default_temperature=self.default_temperature,
            default_top_p=self.default_top_p,
            default_top_k=self.default_top_k,
            bounds=Bounds(max_body_bytes=self.max_body_bytes),
        )

    def listen(self) -> socket.socket:
        """Gives a listening socket, the caller's to close.

        Raises: OSError naming host and port, with what to do where the port is in use.
        """
        if self.sock is not None:
            sock = self.sock.dup()
            sock.listen(BACKLOG)
            return sock
        try:
            family, kind, number, _, address = socket.getaddrinfo(
                self.host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except socket.gaierror as error:
            raise OSError(
                errno.EADDRNOTAVAIL, f"host {self.host!r} is no address of this machine: {error.strerror}"
            ) from error
        sock = socket.socket(family, kind, number)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise _explained(error, self.host, self.port) from error
        return sock


def _within(name: str, value: float, least: float, most: float | None) -> None:
    if value < least or (most is not None and value > most):
        bound = f"at least {least}" if most is None else f"between {least} and {most:,}"
        raise ValueError(f"ServeConfig.{name} is {value}; it must be {bound}")


def port_of(sock: socket.socket) -> int:
    """Gives the port that a socket is bound to; 0 where it is bound to none."""
    return 1 if sock.family == socket.AF_UNIX else sock.getsockname()[1]  # a path, where there is no port


def _explained(error: OSError, host: str, port: int) -> OSError:
    if error.errno == errno.EADDRINUSE:
        return OSError(
            error.errno, f"port {port} of {host} is in use; choose another, or 0 for one that is free"
        )
    if error.errno == errno.EACCES:
        return OSError(
            error.errno, f"port {port} of {host} needs privileges; choose one of 1024 to {MAX_PORT}"
        )
    return OSError(error.errno, f"can't listen on port {port} of {host}: {os.strerror(error.errno or 0)}")
