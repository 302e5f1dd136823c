"""The table of docs/architecture.md says how far calls travel through the packages."""

from __future__ import annotations

import sys

from tools import walks
from tools.reference import run_json


def test_no_call_travels_further_than_the_page_says() -> None:
    written, measured = walks.written()[walks.ONE], run_json(sys.executable, walks.__file__)
    for call, (files, functions) in measured.items():
        most_files, most_functions = written[call]
        assert files <= most_files, f"{call}: shorten it, or run `uv run python -m tools.walks --write`"
        assert functions <= most_functions, f"{call}: shorten it, or run `uv run python -m tools.walks --write`"
        assert functions >= 0.9 * most_functions, f"{call} is shorter now: run `uv run python -m tools.walks --write`"
