#!/usr/bin/env python3
"""Try every tracker against its real library, in an environment of its own: `uv run tools/trackers.py`.

The libraries of all services fit together, but not beside everything that uv.lock has. They are installed into
`.venv-trackers`, which is made on first use and follows tests/tracking/services/requirements.txt. Nothing is sent
anywhere: the services run in their offline or local modes. Further arguments go to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-trackers"
TESTS = ROOT / "tests" / "tracking" / "services"
PACKAGES = (
    "accel-state", "accel-ops", "accel-data", "accel-bigmodel", "accel-tracking", "accel-integrations", "accel-cli",
    "accelerate",
)  # fmt: skip


def environment_python() -> Path:
    """The interpreter of the environment, brought up to date."""
    python = FOLDER / "bin" / "python"
    if not python.exists():
        subprocess.run(["uv", "venv", "-q", "--python", sys.executable, str(FOLDER)], check=True)
    ours = [part for package in PACKAGES for part in ("-e", str(ROOT / "packages" / package))]
    wanted = ["-r", str(TESTS / "requirements.txt"), *ours]
    subprocess.run(["uv", "pip", "install", "-q", "--python", str(python), *wanted], check=True)
    return python


def main() -> int:
    """Run the tests; the exit status is pytest's, and skipped tests count as failures."""
    command = [str(environment_python()), "-m", "pytest", str(TESTS), "-p", "no:cacheprovider", *sys.argv[1:]]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout)
    if done.returncode == 0 and sys.version_info < (3, 13) and " skipped" in done.stdout.splitlines()[-1]:
        print("Tests were skipped: the library of a tracker is missing from the environment.")
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
