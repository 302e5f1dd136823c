"""Models that do not fit: forward passes with offloaded weights, a checkpoint loaded to the GPU, a Llama that generates.

The floor of each is what it takes with all weights on the GPU, or what the copied bytes take at the speed of copies from
pinned memory, measured in the same process, whichever is longer.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.bench.gpu_measure import Figure, Scale, bus_speed
from tools.bench.gpu_models import blocks, llama, num_bytes_of, tokens

SHARD_BYTES = 1 << 31


def build(scale: Scale) -> nn.Sequential:
    """A frozen model of 4.3 GB in bfloat16, on the default device."""
    model = blocks(scale.size(8192, 64), scale.size(8, 3), scale.size(4, 2))
    return model.to(torch.bfloat16).requires_grad_(False)


def offload_figures(scale: Scale) -> Iterator[Figure]:
    """Forward passes with all weights and with half of them in CPU memory."""
    with torch.device(scale.device):
        resident = build(scale)
    width = scale.size(8192, 64)
    inputs = {batch: torch.randn(batch, width, dtype=torch.bfloat16, device=scale.device) for batch in (1, 64)}
    with torch.no_grad():
        computing = {batch: scale.best(partial(resident, x)) for batch, x in inputs.items()}
        expected = {batch: resident(x).cpu() for batch, x in inputs.items()}
    total = num_bytes_of(resident)
    on_cpu = resident.to("cpu")
    for share in (0, 50):
        model, num_copied = offloaded(scale, copy.deepcopy(on_cpu), share, ["Block"])
        for batch, x in inputs.items():
            with torch.no_grad():
                for _ in range(3):
                    output = model(x)
                if not torch.equal(output.cpu(), expected[batch]):
                    raise RuntimeError("another result than with all weights on the GPU")
                taken = scale.best(partial(model, x))
            floor = max(computing[batch], num_copied / bus_speed(scale))
            what = (
                f"forward pass, batch {batch}, {share} % of {total / 1e9:.1f} GB on the GPU; floor: bytes over the bus"
            )
            yield Figure(f"offload {batch} {share}", what, "ms", taken * 1e3, floor * 1e3, taken / floor, 1.05)
        del model


def offloaded(scale: Scale, model: nn.Module, share: int, no_split: list[str]) -> tuple[nn.Module, int]:
    """The model with a share of its bytes on the GPU, and how many bytes each forward pass copies there."""
    from accelerate import cpu_offload, dispatch_model, infer_auto_device_map

    total = num_bytes_of(model)
    if scale.device == "cuda":
        torch.cuda.empty_cache()
    if share:
        limits: dict[Any, int] = {"cpu": 2 * total}
        if scale.device == "cuda":
            limits = {0: total * share // 100, **limits}
        dispatch_model(model, infer_auto_device_map(model, limits, no_split_module_classes=no_split), force_hooks=True)
    else:
        cpu_offload(model, torch.device(scale.device, 0) if scale.device == "cuda" else torch.device("cpu"))
    return model, total - sum(parameter.nbytes for parameter in model.parameters() if parameter.is_cuda)


def loading_figures(scale: Scale) -> Iterator[Figure]:
    """A checkpoint in the page cache to the GPU, over the bus and over safetensors' own function."""
    from safetensors.torch import load_file

    from accelerate import init_empty_weights, load_checkpoint_in_model

    with torch.device(scale.device):
        state = {name: value.cpu() for name, value in build(scale).state_dict().items()}
    total = sum(value.nbytes for value in state.values())
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        paths = write_shards(state, Path(folder))
        del state
        with init_empty_weights():
            empty = build(scale)
        device_map: dict[str, Any] = {"": scale.map_key}
        taken = scale.best(lambda: load_checkpoint_in_model(empty, folder, device_map=device_map))

        def load_by_hand() -> None:
            for path in paths:
                empty.load_state_dict(load_file(path, device=scale.device), strict=False, assign=True)

        by_hand = scale.best(load_by_hand)
    what, floor = f"load {total / 1e9:.1f} GB from the page cache to the GPU", total / bus_speed(scale)
    yield Figure("load over load_file", f"{what}; floor: `load_file`", "s", taken, by_hand, taken / by_hand, 0.5)
    yield Figure("load over bus", f"{what}; floor: bytes over the bus", "s", taken, floor, taken / floor, 1.5)


def write_shards(state: dict[str, torch.Tensor], folder: Path) -> list[Path]:
    """Write a checkpoint as the Hub has them: safetensors files and an index."""
    from safetensors.torch import save_file

    shards: list[dict[str, torch.Tensor]] = [{}]
    room = SHARD_BYTES
    for name, value in state.items():
        if value.nbytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = value
        room -= value.nbytes
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(value.nbytes for value in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return [folder / name for name in names]


def generation_figures(scale: Scale) -> Iterator[Figure]:
    """Tokens per second of a Llama half of which is in CPU memory."""
    count = scale.size(32, 4)
    prompt = tokens(scale, 1, 64)
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    model = llama(scale, 2048, 8192, 16, dtype=torch.bfloat16).eval().requires_grad_(False)
    mask = torch.ones_like(prompt)

    def generate() -> torch.Tensor:
        with torch.no_grad():
            return model.generate(prompt, attention_mask=mask, **options)

    expected = generate().cpu()
    resident = scale.best(generate, 2) / count
    floor_of_host = host_seconds(scale, model, prompt)
    total = num_bytes_of(model)
    model, num_copied = offloaded(scale, model.to("cpu"), 50, ["LlamaDecoderLayer"])
    if not torch.equal(generate().cpu(), expected):
        raise RuntimeError("other tokens than with all weights on the GPU")
    taken = scale.best(generate, 2) / count
    floor = max(resident, num_copied / bus_speed(scale))
    what = f"tokens/s of a generating Llama, {num_copied / total:.0%} of {total / 1e9:.1f} GB in CPU memory"
    yield Figure("generation", f"{what}; floor: bytes over the bus", "/s", 1 / taken, 1 / floor, taken / floor, 1.15)
    host = host_seconds(scale, model, prompt)
    what = "time of the host in one forward pass of that Llama; floor: all weights on the GPU"
    yield Figure("host", what, "ms", host * 1e3, floor_of_host * 1e3, host / floor_of_host, 1.5)


def host_seconds(scale: Scale, model: nn.Module, prompt: torch.Tensor) -> float:
    """How long it takes until all work of a forward pass of one token is enqueued."""

    def enqueue() -> float:
        scale.synchronize()
        begin = time.perf_counter()
        with torch.no_grad():
            model(prompt[:, :1], use_cache=False)
        return time.perf_counter() - begin

    return min(enqueue() for _ in range(scale.size(10, 2)))
