"""Warning about Linux kernels on which distributed programs are known to hang."""

from __future__ import annotations

import logging
import platform
import re

OLDEST_KERNEL = (5, 5)


def check_os_kernel() -> None:
    """Warn on Linux kernels below 5.5, on which distributed programs are known to hang."""
    system = platform.uname()
    match = re.match(r"(\d+)\.(\d+)", system.release)
    if system.system == "Linux" and match and tuple(map(int, match.groups())) < OLDEST_KERNEL:
        logging.getLogger("accelerate").warning(
            f"This Linux kernel is {system.release!r}, and distributed programs can hang on kernels before 5.5.0. "
            "Update the kernel if yours does."
        )
