"""The network addresses and interfaces of this machine."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from accel_cli.errors import UsageError
from accel_state.interfaces import INTERFACE_VARIABLE, interface_of

REACH_SECONDS, RETRY_SECONDS, CONNECT_SECONDS = 20.0, 0.5, 5.0
POD_SECONDS = (
    600.0  # on Kubernetes, where pods that were created together may start minutes apart; torch waits as long
)


def wait_until_reached(
    host: str, port: int, *, listens_here: bool, seconds: float, note: Callable[[str], None] = lambda text: None
) -> None:
    """Wait until machine 0 can be reached: schedulers may give it its name and address later than they start other machines.

    A port at which nobody listens yet is no fault: torch waits for machine 0 to start.

    Args:
        host: Name or address of machine 0.
        port: Of the rendezvous.
        listens_here: Whether this is machine 0.
        seconds: How long to wait.
        note: Called once with the fault, if it lasts for `REACH_SECONDS` and there is more time.

    Raises:
        UsageError: Its name has no address, or nothing answers there; or this machine cannot be reached by that address.
    """
    began = time.monotonic()
    while (fault := _fault(host, port, listens_here)) is not None:
        waited = time.monotonic() - began
        if waited > seconds:
            raise UsageError(fault)
        if waited > REACH_SECONDS:
            note(f"{fault} Waiting for it, up to {seconds:.0f} s.")
            note = _ignore
        time.sleep(RETRY_SECONDS)


def _ignore(text: str) -> None:
    """Take a further note, and do nothing."""


def _fault(host: str, port: int, listens_here: bool) -> str | None:
    """Why machine 0 cannot be reached; None if it can, or nothing speaks against it."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return (
            f"The name of machine 0, {host!r}, has no address on this machine ({error.args[-1]}). Give its address with "
            "--main_process_ip, or make the name resolve on all machines."
        )
    if listens_here:
        return _fault_here(host, port)
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except (ConnectionRefusedError, ConnectionResetError):  # it is there, and has not begun to listen
        return None
    except OSError as error:
        return (
            f"Machine 0 does not answer at {host}:{port} ({error.args[-1]}). Correct --main_process_ip, or open the port on all "
            "machines."
        )
    return None


def _fault_here(host: str, port: int) -> str | None:
    """As `_fault`, on machine 0: an address of its own, or one that leads to it, such as that of a service."""
    try:
        with socket.socket(socket.getaddrinfo(host, port)[0][0]) as probe:
            probe.bind((host, 0))
            return None
    except OSError:
        pass
    try:
        with socket.create_server(("", port)) as listener:
            listener.settimeout(CONNECT_SECONDS)
            if _leads_to(listener, host, port):
                return None
            why = "another machine answers"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # torch says so, or takes another
            return None
        why = str(error.args[-1])
    return (
        f"{host!r} is not an address of this machine, which is machine 0, and does not lead to it at port {port} ({why}). Correct "
        "--main_process_ip or --machine_rank."
    )


def _leads_to(listener: socket.socket, host: str, port: int) -> bool:
    """Whether what connects to an address arrives here: a random word does, among the connections of other machines."""
    word = os.urandom(16)
    with socket.create_connection((host, port), CONNECT_SECONDS) as probe:
        probe.sendall(word)
        with suppress(TimeoutError):
            while True:
                accepted, _ = listener.accept()
                with accepted:
                    accepted.settimeout(CONNECT_SECONDS)
                    if accepted.recv(len(word)) == word:
                        return True
    return False


def gloo_interface(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which gloo finds the network interface of an address, unless they are set already.

    Args:
        address: Of this machine. gloo would resolve its host name instead, which often gives a loopback address.
        environ: The variables that are set already.
    """
    if INTERFACE_VARIABLE in environ or address.startswith("127."):
        return {}
    interface = interface_of(address)
    return {INTERFACE_VARIABLE: interface} if interface else {}
