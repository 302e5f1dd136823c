#!/usr/bin/env python3
"""The diagrams of the documentation; `python -m tools.docs.diagrams` writes them into docs/diagrams/."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from tools.docs.drawing import Drawing
from tools.docs.names import PACKAGES, ROOT

FOLDER = ROOT / "docs" / "diagrams"


def imports() -> dict[str, set[str]]:
    """Which of our packages each one imports, wherever in its modules; what only type checkers read does not count."""
    names = {module: package for package, module in PACKAGES.items()}
    found: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for package, module in PACKAGES.items():
        source = ROOT / "packages" / package / "src"
        for path in (source / module).rglob("*.py"):
            if not all(part.isidentifier() for part in path.relative_to(source).with_suffix("").parts):
                continue  # data: the example programs
            imported = {name.partition(".")[0] for name in _imported(ast.parse(path.read_text()))}
            found[package] |= {names[name] for name in imported if name in names} - {package}
    return found


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    for below in ast.iter_child_nodes(node):
        yield from _imported(below)


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports without those that follow from others."""

    def below(package: str) -> set[str]:
        return edges[package].union(*(below(other) for other in edges[package]))

    return {
        package: {one for one in others if not any(one in below(other) for other in others - {one})}
        for package, others in edges.items()
    }


def package_graph() -> Drawing:
    """The packages in layers, each above those that it imports."""
    edges = imports()
    depth: dict[str, int] = {}

    def layer(package: str) -> int:
        if package not in depth:
            depth[package] = 1 + max((layer(other) for other in edges[package]), default=-1)
        return depth[package]

    highest = max(map(layer, edges))
    drawing = Drawing(64, highest * 8 + 6)
    places: dict[str, tuple[float, float]] = {}
    for level in range(highest + 1):
        row = sorted(package for package in edges if depth[package] == level)
        for number, package in enumerate(row):
            places[package] = (32 + (number - (len(row) - 1) / 2) * 21, 1 + (highest - level) * 8)
    for package, others in reduced(edges).items():
        for other in sorted(others):
            (x, y), (to_x, to_y) = places[package], places[other]
            passes_others = depth[package] - depth[other] > 1
            side = 9 if to_x >= x else -9
            drawing.arrow(*([(x + side, y + 2), (to_x, y + 2)] if passes_others else [(x, y + 4)]), (to_x, to_y))
    for package, (x, y) in places.items():
        drawing.box(x - 9, y, 18, package, "hot" if package == "accelerate" else "")
    return drawing


def batch_way() -> Drawing:
    """What happens between a dataset and an optimizer step."""
    drawing = Drawing(86, 26)
    rows = [
        [("dataset", ""), ("order\nseed, epoch", ""), ("shard\nthis rank's batches", ""), ("workers\none batch ahead", ""), ("device\nnon-blocking", "")],
        [("forward\nautocast", "hot"), ("loss\n/ micro-batches", ""), ("backward\nloss scale (fp16)", "hot"), ("all-reduce\nin the sync step", "warm"), ("clip, step\nscheduler", "hot")],
    ]  # fmt: skip
    for row, boxes in enumerate(rows):
        for number, (text, kind) in enumerate(boxes):
            drawing.box(1 + 17 * number, 3 + 13 * row, 14, text, kind, height=5)
            if number:
                drawing.arrow((17 * number - 2, 5.5 + 13 * row), (17 * number + 1, 5.5 + 13 * row))
    drawing.arrow((76, 8), (76, 12), (8, 12), (8, 16))
    drawing.note(1, 1.5, "data loader: accel-data", left=True)
    drawing.note(10, 14.5, "engine and precision: accel-integrations", left=True)
    drawing.arrow((76, 21), (76, 24), (59, 24))
    drawing.note(50, 24, "next batch, or next window")
    return drawing


def accumulation_window() -> Drawing:
    """Two ranks, four micro-batches, one all-reduce."""
    drawing = Drawing(84, 22)
    for rank in range(2):
        drawing.note(1, 5 + 9 * rank, f"rank {rank}", left=True)
        for number in range(4):
            last = number == 3
            drawing.box(
                8 + 14 * number,
                3 + 9 * rank,
                12,
                f"micro-batch {number + 1}\n{'sync step' if last else 'no_sync'}",
                "hot" if last else "",
            )
            if number:
                drawing.arrow((6 + 14 * number, 5 + 9 * rank), (8 + 14 * number, 5 + 9 * rank))
        drawing.box(68, 3 + 9 * rank, 14, "optimizer.step()\nzero_grad()")
        drawing.arrow((62, 5 + 9 * rank), (68, 5 + 9 * rank))
    drawing.box(50, 8.4, 12, "all-reduce", "warm", height=2.4)
    drawing.note(
        35,
        19,
        "gradient accumulation window: gradients are summed on each rank; step() and zero_grad() do nothing before its end",
    )
    return drawing


def fsdp2_step() -> Drawing:
    """What FSDP 2 does with the blocks of a model in one step."""
    drawing = Drawing(90, 25)
    drawing.note(1, 1.5, "communication", left=True)
    drawing.note(1, 9.5, "computing", left=True)
    for number in range(3):
        drawing.box(1 + 14 * number, 3, 12, f"all-gather {number + 1}", "warm", height=3)
        drawing.box(8 + 13 * number, 11, 12, f"forward {number + 1}", "hot", height=3)
        drawing.arrow((7 + 14 * number, 6), (10 + 13 * number, 11))
    for number, block in enumerate((3, 2, 1)):
        drawing.box(48 + 14 * number, 11, 12, f"backward {block}", "hot", height=3)
        drawing.box(50 + 13.5 * number, 18, 13, f"reduce-scatter {block}", "warm", height=3)
        drawing.arrow((56 + 14 * number, 14), (57 + 13.5 * number, 18))
    for number, block in enumerate((2, 1)):
        drawing.box(49 + 15 * number, 3, 13, f"all-gather {block}", "warm", height=3)
        drawing.arrow((56 + 15 * number, 6), (66 + 14 * number, 11))
    drawing.note(24, 16, "after its forward pass a block is freed (reshard_after_forward)")
    drawing.note(66, 23.5, "the optimizer then steps on this rank's shards")
    return drawing


def streamed_model() -> Drawing:
    """Where the blocks of a streamed model are while one of them computes."""
    drawing = Drawing(84, 20)
    for number, (place, text, kind) in enumerate([
        ("disk, memory-mapped", "blocks 5 ... n", "off"), ("CPU memory, pinned", "block 4\nis read ahead", ""),
        ("CPU to GPU, own stream", "block 3\nis copied", "warm"), ("GPU", "block 2\ncomputes", "hot"),
    ]):  # fmt: skip
        drawing.note(10 + 21 * number, 2, place)
        drawing.box(2 + 21 * number, 4, 16, text, kind, height=5)
        if number:
            drawing.arrow((21 * number - 3, 6.5), (21 * number + 2, 6.5))
    drawing.box(65, 12, 16, "block 1\nslot is free again", "off", height=5)
    drawing.arrow((73, 9), (73, 12))
    drawing.note(32, 14.5, "an event makes the copy wait for the slot, and the forward pass for the copy")
    return drawing


def checkpoint_states() -> Drawing:
    """What is on the disk while save_state runs."""
    drawing = Drawing(88, 20)
    steps = [
        "hidden folder\n.name.token.saving",
        "files\neach fsync'd",
        "manifest.json\nsizes, checksums",
        "rename\natomic",
        "old ones\nbeyond total_limit go",
    ]
    for number, text in enumerate(steps):
        drawing.box(1 + 17.5 * number, 3, 15, text, "hot" if number == 3 else "", height=5)
        if number:
            drawing.arrow((17.5 * number - 1.5, 5.5), (17.5 * number + 1, 5.5))
    drawing.box(
        1, 12, 50, "killed here: the last checkpoint is intact; the next save removes the rest", "off", height=3.5
    )
    drawing.box(53.5, 12, 32.5, "killed here: the new one is complete", "off", height=3.5)
    return drawing


def long_sequences() -> Drawing:
    """Ring attention beside Ulysses, on four ranks."""
    drawing = Drawing(88, 27)
    drawing.note(20, 1.5, "context parallel: ring")
    drawing.note(66, 1.5, "sequence parallel: Ulysses")
    for rank in range(4):
        y = 3.5 + 5.5 * rank
        drawing.box(1, y, 15, f"rank {rank}: queries {rank}", "hot")
        drawing.box(22, y, 15, f"keys, values {rank}", "warm")
        drawing.arrow((22, y + 2), (16, y + 2))
        if rank:
            drawing.arrow((29.5, y - 1.5), (29.5, y))
        drawing.box(46, y, 17, f"rank {rank}: tokens {rank}\nall heads", "hot")
        drawing.box(70, y, 17, f"all tokens\nheads {rank}", "warm")
        drawing.arrow((63, y + 2), (70, 3.5 + 5.5 * (3 - rank) + 2))
    drawing.arrow((37, 22), (40, 22), (40, 5.5), (37, 5.5))
    drawing.note(20, 26, "blocks move on, n - 1 times")
    drawing.note(66, 26, "all-to-all before attention, and back after it")
    return drawing


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        package_graph,
        batch_way,
        accumulation_window,
        fsdp2_step,
        streamed_model,
        checkpoint_states,
        long_sequences,
    )
}


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for name, make in DIAGRAMS.items():
        (FOLDER / f"{name}.svg").write_text(make().svg())


if __name__ == "__main__":
    main()
