"""The page on notebooks, as a notebook: each block is a cell, and a real kernel runs them."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "start" / "notebooks.md"

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.launch,
    pytest.mark.skipif(
        importlib.util.find_spec("nbclient") is None and "LIBRARIES_REQUIRED" not in os.environ,
        reason="needs nbclient and ipykernel: uv run tools/dev.py docs",
    ),
]


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place for the kernel's files, and CPU processes."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def executed(cells: list[str], **options: bool) -> list[str]:
    """Run cells in a kernel, and return what each has printed."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300, **options).execute()
    return [
        "".join(output.get("text", output.get("evalue", "")) for output in cell.outputs) for cell in notebook.cells
    ]


@pytest.mark.usefixtures("kernels")
def test_the_cells_of_the_page_run_in_a_kernel() -> None:
    text = PAGE.read_text()
    cells = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    shown = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    printed = executed(cells)
    assert len(printed) == 2
    assert [line for line in shown if line.startswith("Starting") or " on cpu" in line] == printed[0].splitlines()


@pytest.mark.usefixtures("kernels")
def test_a_cell_before_that_made_an_accelerator_is_named() -> None:
    cells = [
        "from accelerate import Accelerator, notebook_launcher\naccelerator = Accelerator()",
        "notebook_launcher(print, num_processes=2)",
    ]
    assert "exists in this process already" in executed(cells, allow_errors=True)[1]
