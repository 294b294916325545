"""The addresses of machines that ranks run on: which one to listen on, and which one others are told.

Knows the system's resolver and sockets; knows no frame.
"""

import errno
import ipaddress
import logging
import socket
from typing import Any, Final

log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"


def check_host(host: str | None) -> None:
    """Refuses a host that can't be told to another machine. Raises: ValueError."""
    if host is None:
        return
    try:
        (_, _, _, _, address), *_ = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return  # a name
    if _ip(address).is_unspecified:
        raise ValueError(
            f"coordinator_host is {host}, which is every address of this machine and none that another"
            " machine reaches; name one that they reach"
        )


def listening(host: str | None, port: int | None) -> socket.socket:
    """Gives a socket that listens; `host` None is loopback, `port` None is one that the system chooses.

    So is another, and a warning says so, where the port is taken; another warning says that a name is
    loopback here. Raises: OSError when the host is none of this machine's.
    """
    family, _, _, _, address = resolved(host or LOOPBACK, port or 0)[0]
    if host and host not in ("localhost", address[0]) and _ip(address).is_loopback:
        log.warning(
            "coordinator_host %s is %s on this machine, which other machines do not reach; give the address"
            " that they know it by, or correct /etc/hosts",
            host,
            address[0],
        )
    try:
        return _bound(family, address)
    except OSError as error:
        if not port or error.errno != errno.EADDRINUSE:
            raise
    log.warning("coordinator_port %d is taken; listening on another one", port)
    return _bound(family, (address[0], 0, *address[2:]))


def address_towards(host: str) -> str:
    """Gives the address of this machine that packets to a host leave from. Nothing is sent.

    Raises: OSError when the host is not known, or not reached from here.
    """
    family, _, _, _, address = resolved(host, 1)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        own: str = sock.getsockname()[0]
    return own


def resolved(host: str, port: int) -> list[Any]:  # Any: an address is a tuple of the family's own shape
    """Gives a host's addresses as `socket.getaddrinfo` does, the best first. May wait for a name server.

    Raises: OSError when the host is not known.
    """
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _bound(family: socket.AddressFamily, address: Any) -> socket.socket:  # Any: the same
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if address[1]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last run's may linger
        sock.bind(address)
        sock.listen()
    except OSError:
        sock.close()
        raise
    return sock


def _ip(address: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address:  # Any: the same
    return ipaddress.ip_address(address[0].partition("%")[0])
