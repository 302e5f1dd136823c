"""The table of docs/architecture.md says how far calls travel through the packages."""

from __future__ import annotations

import sys

import pytest
import torch

from tools import walks
from tools.reference import run_json

COUNTED_WITH = "2.13 3.11"  # later versions of Python call no function for a comprehension
RUNS = f"{'.'.join(torch.__version__.split('.')[:2])} {sys.version_info[0]}.{sys.version_info[1]}"


@pytest.mark.skipif(RUNS != COUNTED_WITH, reason=f"the page counts with torch and Python {COUNTED_WITH}")
def test_no_call_travels_further_than_the_page_says() -> None:
    written, measured = walks.written()[walks.ONE], run_json(sys.executable, walks.__file__)
    for call, (files, functions) in measured.items():
        most_files, most_functions = written[call]
        assert files <= most_files, f"{call}: shorten it, or run `uv run python -m tools.walks --write`"
        assert functions <= most_functions, f"{call}: shorten it, or run `uv run python -m tools.walks --write`"
        assert functions >= 0.9 * most_functions, f"{call} is shorter now: run `uv run python -m tools.walks --write`"
