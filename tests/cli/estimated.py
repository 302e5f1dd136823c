"""Small model folders for the tests of `accelerate estimate-memory`, and what a real training step allocates."""

from __future__ import annotations

import gc
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from accel_cli.estimate.batches import BATCHES, BatchSize
from accel_cli.estimate.building import build
from accel_cli.estimate.optimizers import make_optimizer
from accel_cli.estimate.source import find_model
from accel_cli.estimate.training import AUTOCAST_DTYPES, StepSettings, enable_checkpointing
from accel_ops.dtypes import convert_to_fp32

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100,
              "num_key_value_heads": 2, **SMALL},
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 100, "n_embd": 32, "n_layer": 2,
             "n_head": 4, "n_positions": 128, "bos_token_id": 1, "eos_token_id": 1},
    "bert": {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 100,
             "max_position_embeddings": 128, **SMALL},
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, "patch_size": 8,
            **SMALL},
    "headless": {"model_type": "bert", "vocab_size": 100, "max_position_embeddings": 128, **SMALL},
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 100, "d_model": 32,
           "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    "mixtral": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 100,
                "num_key_value_heads": 2, "num_local_experts": 4, **SMALL},
    "clip": {"model_type": "clip", "architectures": ["CLIPModel"], "text_config": {"vocab_size": 100, **SMALL},
             "vision_config": {"image_size": 32, "patch_size": 8, **SMALL}},
    "resnet": {"architecture": "resnet18", "num_classes": 10},
}  # fmt: skip


def model_folder(folder: Path, kind: str, **changes: Any) -> str:
    """Write a folder with a config.json and nothing else."""
    path = folder / kind
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIGS[kind], **changes}))
    return str(path)


def tensor_file(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """Write a safetensors file from name -> dtype, shape and bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def allocated(folder: str, settings: StepSettings, size: BatchSize) -> list[int]:
    """Take a real step on the CPU; the most bytes that the allocator had given out in its three phases."""
    source = find_model(folder)
    gc.collect()  # what other tests left behind must not be given back meanwhile
    kind = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            _real_step(source, settings, size)
    finally:
        os.environ.pop("KINETO_LOG_LEVEL") if kind is None else os.environ.update(KINETO_LOG_LEVEL=kind)
    live = peak = 0
    peaks = []
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
        elif event.name() == "END":
            peaks.append(peak)
            peak = live
    return peaks[1:]


def _real_step(source: Any, settings: StepSettings, size: BatchSize) -> None:
    model = build(source)
    model.train()
    if settings.gradient_checkpointing:
        enable_checkpointing(model)
    optimizer = make_optimizer(settings.optimizer, list(model.parameters()), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    batch = BATCHES[source.library](model, size)
    gc.collect()
    _end()
    precision = settings.mixed_precision
    with nullcontext() if precision == "no" else torch.autocast("cpu", dtype=AUTOCAST_DTYPES[precision]):
        outputs = model(*batch.args, **batch.kwargs)
    if precision != "no":
        outputs = convert_to_fp32(outputs)
    loss = batch.loss(outputs)
    _end()
    loss.backward()
    _end()
    optimizer.step()
    _end()


def _end() -> None:
    with torch.profiler.record_function("END"):
        pass
