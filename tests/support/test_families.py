"""What a worker of a parallel run takes as a whole, and in which order."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.families import ROOT, family_of, in_order

TESTS = sorted(path.relative_to(ROOT).as_posix() for path in Path(ROOT, "tests").rglob("test_*.py"))


class Item:
    def __init__(self, file: str) -> None:
        self.nodeid = f"{file}::test_something[a::b]"


def test_files_that_use_the_pool_of_ranks_are_one_family() -> None:
    for file in TESTS:
        text = Path(ROOT, file).read_text()
        tree = ast.parse(text if "ranks(" in text else "")
        decorators = [one for node in ast.walk(tree) for one in getattr(node, "decorator_list", [])]
        names = {getattr(getattr(one, "func", None), "id", "") for one in decorators}
        if {"ranks", "deepspeed_ranks"} & names:
            assert family_of(file) in ("ranks", "pretended machine"), file
    assert family_of("tests/ops/test_tensor_files.py") == "tests/ops/test_tensor_files.py"
    assert family_of("tests/cuda_shapes/test_table.py") == family_of("tests/gpu/test_scenarios_elsewhere.py")


def test_long_families_come_first() -> None:
    files = [
        "tests/ops/test_tensor_files.py",
        "tests/cli/test_launching.py",
        "tests/parity/test_parallel.py",
        "tests/cuda_shapes/test_table.py",
    ]
    assert [item.nodeid.partition("::")[0] for item in in_order(map(Item, files))] == [  # type: ignore[arg-type]
        files[2],
        files[3],
        files[1],
        files[0],
    ]
