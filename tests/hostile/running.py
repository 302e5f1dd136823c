"""Programs of these tests, which fork processes that have imported torch already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def last_line_of(*words: str) -> Any:
    """Run Python; returns the JSON of the last line that it prints."""
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
