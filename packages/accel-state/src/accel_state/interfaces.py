"""Through which address and network interface this machine reaches another one."""

from __future__ import annotations

import socket
import struct
import sys

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""The interface that gloo uses. Without it, gloo takes the address of the host's name, which is often a loopback address."""
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface, see netdevice(7)


def own_address(towards: str) -> str | None:
    """The address by which another machine sees this one.

    Args:
        towards: Name or address of the other machine, which may be this one.

    Returns:
        The address; None when the other machine cannot be reached.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # of a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None where there is none, or the system is not Linux."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def interface_to(host: str | None) -> str | None:
    """The network interface through which this machine reaches another.

    Args:
        host: Name or address of the other machine.

    Returns:
        Its name; None when the other is this machine by a loopback address, or cannot be found, or the system is not Linux.
    """
    address = own_address(host) if host else None
    return None if address is None or address.startswith("127.") else interface_of(address)
