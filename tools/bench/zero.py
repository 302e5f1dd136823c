"""DeepSpeed: a loop written by hand around `deepspeed.initialize` over one through `prepare`."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.ddp import compare
from tools.bench.row import Row
from tools.reference import run_on_ranks

BATCH, BATCHES = 8, 50
STAGES = (0, 2, 3)


def rows(reference: Path) -> list[Row]:
    """Measure ours beside DeepSpeed alone; accelerate 1.15 is measured where its environment has DeepSpeed."""
    ours = run_on_ranks(sys.executable, __file__)
    try:
        theirs = run_on_ranks(reference, __file__)
    except RuntimeError as error:
        if "No module named 'deepspeed'" not in str(error):
            raise
        theirs = {}
    return [
        Row(
            f"DeepSpeed samples/s, hand-written over prepared, ZeRO-{stage}, 2 ranks",
            "x",
            ours[str(stage)],
            theirs.get(str(stage)),
            1.0,
            ours[str(stage)],
            1.02,
        )
        for stage in STAGES
    ]


def worker() -> None:
    """One rank: measure all stages and let rank 0 print it."""
    import deepspeed
    import torch

    from accelerate import Accelerator, DeepSpeedPlugin

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    found = {}
    for stage in STAGES:
        from accelerate.state import AcceleratorState

        plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1.0)
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
        hand_written, prepared = hand_written_loop(deepspeed, stage), prepared_loop(accelerator)
        found[stage] = compare(hand_written, prepared)["ratio"]
        del hand_written, prepared
        accelerator.free_memory()
        AcceleratorState._reset_state()
    if rank == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def hand_written_loop(deepspeed: Any, stage: int) -> Callable[[], None]:
    """As DeepSpeed's documentation has it."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    from tests.support.tiny_transformer import Tokens, make_model, shift, token_loss

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    world = torch.distributed.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": float("inf"),
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    data = Tokens(count=BATCHES * BATCH * world)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))

    def loop() -> None:
        for batch in loader:
            engine.backward(token_loss(engine(batch["input_ids"]), shift(batch["labels"])))
            engine.step()

    return loop


def prepared_loop(accelerator: Any) -> Callable[[], None]:
    """The same through `prepare`."""
    import torch

    from tests.support.tiny_transformer import make_loader, make_model, shift, token_loss

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = make_loader(BATCH, count=BATCHES * BATCH * accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def loop() -> None:
        for batch in loader:
            accelerator.backward(token_loss(model(batch["input_ids"]), shift(batch["labels"])))
            optimizer.step()
            optimizer.zero_grad()

    return loop


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    worker()
