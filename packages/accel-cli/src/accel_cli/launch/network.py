"""How this machine reaches the others."""

from __future__ import annotations

import socket
import struct
import sys

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def own_address(towards: str) -> str | None:
    """Find the address by which another machine sees this one.

    Args:
        towards: The other machine, by name or address; may be this one.

    Returns:
        The address; None when there is no way there.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """Find the network interface that has an IPv4 address; None where the system does not say."""
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
