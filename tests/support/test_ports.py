"""Ports that tests choose."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.support.ports import HIGHEST, free_ports


def test_chosen_ports_differ_and_can_be_listened_on() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("", port))
            listener.listen()


def test_the_system_gives_none_of_them_to_connections() -> None:
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if limits.exists():
        assert int(limits.read_text().split()[0]) > HIGHEST
