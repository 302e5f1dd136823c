"""The network addresses and interfaces of this machine."""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Mapping

from accel_cli.errors import UsageError

RESOLVE_SECONDS, RETRY_SECONDS = 20.0, 0.5
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def wait_until_resolved(host: str, seconds: float = RESOLVE_SECONDS) -> None:
    """Wait until the name of a machine has an address: schedulers may publish it later than they start the first processes.

    Args:
        host: Name or address.
        seconds: How long to wait.

    Raises:
        UsageError: It has none.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"The name of machine 0, {host!r}, has no address on this machine ({error.args[-1]}). Give its address with "
                    "--main_process_ip, or make the name resolve on all machines."
                ) from error
        time.sleep(RETRY_SECONDS)


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
