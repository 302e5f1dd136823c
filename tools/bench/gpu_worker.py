"""A process that takes figures of one library on one device, part by part, and prints them as they come.

    python -m tools.bench.gpu_worker '{"device": "cuda", "tiny": false, "is_ours": true}' 60 step waits

The number is that of seconds after which no further part begins.

Lines that begin with `MARK` hold JSON for `tools/bench/gpu.py`; all else is what libraries print. A part that hangs ends the
process at its time limit, with the stack on stderr; one that raises an error is reported, and the next one begins.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from tools.bench.gpu_checkpoint import checkpoint_figures
from tools.bench.gpu_measure import Figure, Scale, bus_speed
from tools.bench.gpu_memory import memory_figures
from tools.bench.gpu_models import has_transformers
from tools.bench.gpu_offload import generation_figures, loading_figures, offload_figures
from tools.bench.gpu_sharded import fsdp_figures
from tools.bench.gpu_training import llama_figures, loader_figures, step_figures, wait_figures

MARK = "GPU-FIGURES "


@dataclass(frozen=True)
class Part:
    """A few figures that are taken together.

    Attributes:
        measure: Takes them.
        seconds: After which it is ended.
        has_group: Whether it runs as the only rank of a process group.
        needs_transformers: Whether its model is a Llama.
    """

    measure: Callable[[Scale], Iterator[Figure]]
    seconds: int
    has_group: bool = False
    needs_transformers: bool = False


PARTS = {  # memory comes first, while the process is fresh; compiling last, as it takes longest
    "memory": Part(memory_figures, 45, needs_transformers=True),
    "memory in a group": Part(memory_figures, 60, has_group=True, needs_transformers=True),
    "step": Part(step_figures, 40),
    "waits": Part(wait_figures, 30),
    "loader": Part(loader_figures, 45),
    "loading": Part(loading_figures, 60),
    "offload": Part(offload_figures, 60),
    "checkpoint": Part(checkpoint_figures, 60),
    "generation": Part(generation_figures, 60, needs_transformers=True),
    "fsdp2": Part(fsdp_figures, 45, has_group=True),
    "llama": Part(llama_figures, 120, needs_transformers=True),
}


def send(**message: object) -> None:
    """One message for the process that collects them."""
    print(MARK + json.dumps(message), flush=True)


def take(name: str, scale: Scale) -> None:
    """Take the figures of a part and report them, or the error."""
    part = PARTS[name]
    send(begins=name)
    if part.needs_transformers and not has_transformers():
        send(failed="needs transformers")
        return
    patience = scale.size(1, 6)  # tiny runs come beside other work
    faulthandler.dump_traceback_later(part.seconds * patience, exit=True)
    try:
        for figure in part.measure(scale):
            send(figure=asdict(figure))
    except Exception as error:
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        send(failed=f"{type(error).__name__}: {lines[0][:120]}".replace("|", "/"))
    finally:
        faulthandler.cancel_dump_traceback_later()
    release(scale)
    send(ends=name)


def release(scale: Scale) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if scale.device == "cuda":
        torch.cuda.empty_cache()


def main(arguments: list[str]) -> int:
    """Take all parts that are named."""
    import accelerate
    from accelerate import Accelerator  # noqa: F401 - all that it imports, which no part is to wait for

    warnings.simplefilter("ignore")
    scale = Scale(**json.loads(arguments[0]))
    if scale.device == "cpu":
        torch.set_num_threads(1)  # the code is tried, beside other work
    end = time.monotonic() + float(arguments[1])
    send(library=f"accelerate {accelerate.__version__}", folder=os.path.dirname(accelerate.__file__))
    if "offload" in arguments:
        send(bus=bus_speed(scale))
        release(scale)
    for name in arguments[2:]:
        if time.monotonic() > end:
            send(begins=name)
            send(failed="no time left")
        else:
            take(name, scale)
    sys.stdout.flush()
    os._exit(0)  # all is measured: how a process group ends does not matter


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
