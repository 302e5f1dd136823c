"""Two machines on one: network namespaces with a cable between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

needs_namespaces = pytest.mark.skipif(
    shutil.which("ip") is None or shutil.which("unshare") is None or os.geteuid() != 0,
    reason="needs root, and the programs ip and unshare, to make network namespaces",
)
ADDRESSES = ("10.79.0.1", "10.79.0.2")
INTERFACE = "eth9"
COMMANDS = f"""
ip netns add {{first}} && ip netns add {{second}} || exit 1
ip link add {INTERFACE} netns {{first}} type veth peer name {INTERFACE} netns {{second}} || exit 1
ip -n {{first}} addr add {ADDRESSES[0]}/24 dev {INTERFACE} || exit 1
ip -n {{second}} addr add {ADDRESSES[1]}/24 dev {INTERFACE} || exit 1
for name in {{first}} {{second}}; do ip -n $name link set {INTERFACE} up; ip -n $name link set lo up; done
"""


@contextmanager
def two_machines(prefix: str) -> Iterator[tuple[str, str]]:
    """The names of two namespaces that reach one another at `ADDRESSES`.

    Args:
        prefix: What their names begin with.
    """
    names = (f"{prefix}{os.getpid()}a", f"{prefix}{os.getpid()}b")
    script = COMMANDS.format(first=names[0], second=names[1])
    made = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    try:
        if made.returncode:
            pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip() or made.stdout.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def inside(machine: str, hostname: str, command: str) -> list[str]:
    """The words that run a shell command on a machine, which then has a name of its own."""
    return ["ip", "netns", "exec", machine, "unshare", "--uts", "sh", "-c", f"hostname {hostname}; exec {command}"]


def under_an_unknown_name() -> list[str]:
    """The words before a command that give it a host name that nothing resolves; none where that is not permitted."""
    words = ["unshare", "--uts", "sh", "-c", 'hostname unknown.invalid && exec "$@"', "sh"]
    may = (
        shutil.which("unshare") and subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0
    )
    return words if may else []
