"""Is the system's kernel known to make trouble?"""

from __future__ import annotations

import logging
import platform
import re

OLDEST_KERNEL = (5, 5)


def check_os_kernel() -> None:
    """Warn on Linux kernels below 5.5, on which processes that talk to one another are known to hang."""
    system = platform.uname()
    found = re.match(r"(\d+)\.(\d+)", system.release)
    if system.system == "Linux" and found and tuple(map(int, found.groups())) < OLDEST_KERNEL:
        logging.getLogger("accelerate").warning(
            f"This Linux kernel is {system.release!r}; programs of several processes can hang on kernels before 5.5.0. "
            "Update the kernel if yours does."
        )
