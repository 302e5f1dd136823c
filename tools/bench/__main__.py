"""Measure everything, or the parts named, and print one table; `--write` puts it into docs/performance.md.

uv run tools/dev.py bench
uv run tools/dev.py bench step ddp
"""

from __future__ import annotations

import argparse
import importlib
import platform
import re
import sys
from importlib.metadata import version

from tools.bench.row import Row, table
from tools.reference import ROOT, reference_python

PARTS = {
    "step": "What the accelerator adds to a training step",
    "memory": "Memory of a training step",
    "ddp": "Data parallel training",
    "sharded": "Sharded training",
    "sequences": "Sharded sequences",
    "fp8": "Training in FP8",
    "zero": "DeepSpeed",
    "megatron": "Megatron-LM",
    "collectives": "Collectives",
    "dataloading": "Data loading",
    "startup": "Starting",
    "checkpoint": "Checkpoints",
    "building": "Building without memory",
    "loading": "Loading big models",
    "offload": "Models in parts",
    "disk": "Models on disk",
    "tracking": "Logging",
}
PAGE = ROOT / "docs" / "performance.md"


def measure(names: list[str]) -> dict[str, list[Row]]:
    """The rows of each part, shown as they come."""
    reference = reference_python()
    found = {}
    for name in names:
        found[name] = importlib.import_module(f"tools.bench.{name}").rows(reference)
        print(f"\n## {PARTS[name]}\n\n{table(found[name])}", flush=True)
    return found


def write(found: dict[str, list[Row]]) -> None:
    """Replace the measured sections of the page, between their markers."""
    page = PAGE.read_text()
    for name, rows in found.items():
        block = f"<!-- {name} -->\n\n{table(rows)}\n\n<!-- end {name} -->"
        page, count = re.subn(rf"<!-- {name} -->.*?<!-- end {name} -->", lambda _, b=block: b, page, flags=re.DOTALL)
        if not count:
            raise SystemExit(f"{PAGE} has no section between <!-- {name} --> and <!-- end {name} -->")
    PAGE.write_text(page)


def main() -> int:
    """Measure, print and, if asked, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    args = parser.parse_args()
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"no part {part!r}: choose from {', '.join(PARTS)}")
    print(f"{platform.platform()}, Python {platform.python_version()}, torch {version('torch')}")
    found = measure(args.parts or list(PARTS))
    if args.write:
        write(found)
    missed = [row.what for rows in found.values() for row in rows if not row.met]
    print(
        f"\n{len(missed)} of {sum(map(len, found.values()))} goals missed"
        + (": " + "; ".join(missed) if missed else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
