"""Sharded training: a hand-written `fully_shard` loop over a prepared one, memory of each rank, and what a save needs."""

from __future__ import annotations

import gc
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.ddp import compare
from tools.bench.row import Row
from tools.reference import run_on_ranks

BATCH, BATCHES = 8, 50
WIDE = {"width": 512, "heads": 8, "layers": 6}
MIB = 2**20


def rows(reference: Path) -> list[Row]:
    """Measure ours beside plain torch; accelerate 1.15 does not shard on the CPU."""
    two, one = run_on_ranks(sys.executable, __file__), run_on_ranks(sys.executable, __file__, world=1)
    speed, peak, floor = two["ratio"], two["prepared_mib"], two["hand_written_mib"]
    share = two["state_mib"] / one["state_mib"]
    rise, state = two["save_rise_mib"], one["state_mib"]
    return [
        Row("FSDP2 samples/s, hand-written over prepared, 2 ranks", "x", speed, None, 1.0, speed, 1.03),
        Row("FSDP2 peak memory of a rank, 2 ranks", "MiB", peak, None, floor, peak / floor, 1.03),
        Row(
            "parameters and optimizer state of a rank, 2 ranks over 1",
            "MiB",
            two["state_mib"],
            None,
            None,
            share,
            0.51,
        ),
        Row(
            "memory rank 0 takes for a sharded save, over the whole state", "MiB", rise, None, None, rise / state, 0.5
        ),
    ]


def worker() -> None:
    """One rank: measure everything and let rank 0 print it."""
    import torch

    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    torch.set_num_threads(1)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    hand_written, prepared = hand_written_loop(), prepared_loop(accelerator)
    found = compare(hand_written, prepared) if accelerator.num_processes > 1 else {}
    del hand_written, prepared
    accelerator.free_memory()
    found |= memory(accelerator)
    if accelerator.is_main_process:
        print(json.dumps(found), flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def hand_written_loop(batches: int = BATCHES, **options: Any) -> Callable[[], None]:
    """Plain torch, as its documentation has it."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, DistributedSampler

    from tests.support.tiny_transformer import Tokens, make_model, shift, token_loss

    model = make_model(**options)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Tokens(count=batches * BATCH * torch.distributed.get_world_size())
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))

    def loop() -> None:
        for batch in loader:
            token_loss(model(batch["input_ids"]), shift(batch["labels"])).backward()
            optimizer.step()
            optimizer.zero_grad()

    return loop


def prepared_loop(accelerator: Any, batches: int = BATCHES, **options: Any) -> Callable[[], None]:
    """The same through `prepare`."""
    import torch

    from tests.support.tiny_transformer import make_loader, make_model, shift, token_loss

    model = make_model(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = make_loader(BATCH, count=batches * BATCH * accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def loop() -> None:
        for batch in loader:
            accelerator.backward(token_loss(model(batch["input_ids"]), shift(batch["labels"])))
            optimizer.step()
            optimizer.zero_grad()

    return loop


def memory(accelerator: Any) -> dict[str, float]:
    """Peaks of both loops with a wide model, what this rank holds of it, and what saving it adds, in MiB."""
    peaks: dict[str, list[float]] = {"hand_written_mib": [], "prepared_mib": []}
    for _ in range(3):  # the first time, the allocator grows
        peaks["hand_written_mib"].append(peak(lambda: hand_written_loop(4, **WIDE)()))
        peaks["prepared_mib"].append(peak(lambda: prepared_loop(accelerator, 4, **WIDE)()))
        accelerator.free_memory()
    loop = prepared_loop(accelerator, 4, **WIDE)
    loop()
    optimizer = accelerator._optimizers[0]
    tensors = list(accelerator._models[0].parameters())
    tensors += [value for entry in optimizer.state.values() for value in entry.values()]
    held = sum(part.numel() * part.element_size() for part in (getattr(one, "_local_tensor", one) for one in tensors))
    folder = [tempfile.mkdtemp()]
    if accelerator.num_processes > 1:
        import torch

        torch.distributed.broadcast_object_list(folder)
    accelerator.save_state(Path(folder[0], "first"))  # imports what saving needs
    before = resident("VmRSS")
    rise = peak(lambda: accelerator.save_state(Path(folder[0], "second"))) - before
    return {
        **{name: min(values[1:]) for name, values in peaks.items()},
        "state_mib": held / MIB,
        "save_rise_mib": rise,
    }


def peak(work: Callable[[], Any]) -> float:
    """The most memory that this process held while it did something, in MiB."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # begin to count anew
    work()
    return resident("VmHWM")


def resident(field: str) -> float:
    """A field of this process's memory, in MiB."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


if __name__ == "__main__":
    worker()
