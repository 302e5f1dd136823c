"""A process with pretended GPUs: a fork of it for each task, so that each starts without groups, contexts and states.

It reads tasks from its standard input, one JSON list a line - module, function, arguments, file for the result - and
answers with the exit code of the fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path


def main() -> None:
    """Import what all tasks need, without touching a GPU, and serve."""
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.experimental

    import accelerate  # noqa: F401
    from tests.cuda_shapes import columns, device_maps  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # or each collection in a fork looks at all of torch, and copies its pages
    for line in sys.stdin:
        module, function, arguments, result = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _run(module, function, arguments, Path(result))
                code = 0
            except BaseException:
                Path(result).write_text(json.dumps({"error": traceback.format_exc()}))
            finally:
                os._exit(code)
        sys.stdout.write(f"{os.waitpid(child, 0)[1]}\n")
        sys.stdout.flush()


def _run(module: str, function: str, arguments: list[object], result: Path) -> None:
    import torch

    from tests.cuda_shapes.pretended_group import launch, pretend_groups
    from tests.cuda_shapes.rows import ROWS

    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    pretend_groups()
    if function == "run_row":
        world = int(arguments[1])  # type: ignore[call-overload]
        if ROWS[str(arguments[0])].is_launched:
            launch(world, local_rank=min(world - 1, 3))
        arguments[2] = Path(str(arguments[2]))
    actual = getattr(importlib.import_module(module), function)(*arguments)
    result.write_text(json.dumps(actual))


if __name__ == "__main__":
    main()
