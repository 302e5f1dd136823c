"""Two machines that reach one another by ssh: network namespaces with a daemon each, for launchers that need a hostfile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.machines import ADDRESSES, inside, two_machines

HOSTS = ("first", "second")
DAEMON = "/usr/sbin/sshd"
SECONDS = 300


def lacks(*programs: str) -> str:
    """Why machines cannot be started that have these programs; empty if they can."""
    missing = [name for name in (DAEMON, "ssh-keygen", "ip", "unshare", *programs) if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "needs root, to make network namespaces"


@dataclass(frozen=True)
class Machines:
    """Two machines with the same files.

    Attributes:
        names: Of their network namespaces.
        folder: Holds their keys, and the file `hosts` with one slot on each.
    """

    names: tuple[str, str]
    folder: Path

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a shell command on the first machine."""
        programs = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {
            "PATH": programs, "OMP_NUM_THREADS": "1", "DS_BUILD_SHM_COMM": "0",
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }  # fmt: skip
        return subprocess.run(
            inside(self.names[0], HOSTS[0], command),
            env={**os.environ, **variables}, cwd=self.folder, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip


@contextmanager
def ssh_machines(folder: Path) -> Iterator[Machines]:
    """Two machines whose first one may log in to both.

    Args:
        folder: For their keys and the hostfile; both see it.
    """
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    client = folder / "bin" / "ssh"
    client.parent.mkdir()
    options = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    options += " -o ConnectionAttempts=30"  # one each second: the daemons may still be starting
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -i {folder}/user {options} "$@"\n')
    client.chmod(0o755)
    (folder / "hosts").write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    os.makedirs("/run/sshd", exist_ok=True)  # sshd refuses to start without it
    settings = f"-o AuthorizedKeysFile={folder}/user.pub -o StrictModes=no -o PidFile=none -o PermitRootLogin=yes"
    with two_machines("ssh") as names, ExitStack() as stack:
        for name, host in zip(names, HOSTS, strict=True):
            command = f"{DAEMON} -D -e -f /dev/null -h {folder}/host {settings}"
            daemon = subprocess.Popen(inside(name, host, command), stderr=subprocess.DEVNULL)
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
        yield Machines(names, folder)
