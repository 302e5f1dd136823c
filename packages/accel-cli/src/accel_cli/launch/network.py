"""The network addresses and interfaces of this machine."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Mapping

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def own_address(towards: str) -> str | None:
    """Find the address by which another machine sees this one.

    Args:
        towards: Name or address of the other machine, which may be this one.

    Returns:
        The address; None when the other machine cannot be reached.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def gloo_interface(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which gloo finds the network interface of an address, unless they are set already.

    Args:
        address: Of this machine. gloo would resolve its host name instead, which often gives a loopback address.
        environ: The variables that are set already.
    """
    if "GLOO_SOCKET_IFNAME" in environ or address.startswith("127."):
        return {}
    interface = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def interface_of(address: str) -> str | None:
    """Find the network interface that has an IPv4 address; None where the system does not support it."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # one without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
