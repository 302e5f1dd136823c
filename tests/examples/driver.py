"""Run by a launch: several examples, one after the other, each as a program; says what each printed and how it ended.

The argument is a JSON file with a list of command lines, each a list that begins with the example's name. Starting a
process and importing torch costs more than most examples do.
"""

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "packages" / "accel-cli" / "src" / "accel_cli" / "examples" / "example-files"
sys.path.insert(0, str(ROOT))

from tests.support.dtensor_caches import forget_meshes  # noqa: E402 - found only from here on
from tests.support.leaks import reset_state  # noqa: E402


def run(words: list[str], store: str) -> dict[str, Any]:
    """Run one example, on several ranks in a process group of its own; returns what it printed, and its error."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    before = dict(os.environ)
    if world > 1:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    program = EXAMPLES / words[0]
    sys.argv = words
    sys.path.insert(0, str(program.parent))  # as Python does for a program that it starts
    printed, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(program), run_name="__main__")
    except BaseException:
        error = traceback.format_exc()
    finally:
        sys.path.remove(str(program.parent))
        reset_state()
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
        os.environ.clear()
        os.environ.update(before)
    return {"printed": printed.getvalue(), "error": error}


def main() -> None:
    """Run all until one fails, which leaves the ranks at different places; the main process writes the results."""
    given = Path(sys.argv[1])
    results = []
    for number, words in enumerate(json.loads(given.read_text())):
        results.append(run(words, f"{given}.{number}"))
        if results[-1]["error"]:
            break
    given.with_suffix(f".rank{os.environ.get('RANK', '0')}").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
