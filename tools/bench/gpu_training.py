"""Training on one GPU beside the same loop written by hand: what a step adds, and a compiled language model in bfloat16."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from tools.bench.row import Row

PAIRS = 12  # of blocks, taken by turns
TOKENS, BATCH, VOCABULARY = 1024, 4, 32000


def training_rows(device: str, layers: int | None = None) -> Iterator[Row]:
    """The figures.

    Args:
        device: "cuda", or "cpu" to try the code.
        layers: Of the language model; None for a billion parameters.
    """
    yield step_row(device, 20 if layers is None else 2)
    yield language_model_row(device, layers)


def by_turns(device: str, raw: Callable[[], Any], prepared: Callable[[], Any], steps: int) -> tuple[float, float]:
    """Median seconds of a step by hand and prepared, in blocks taken by turns."""

    def block(step: Callable[[], Any]) -> float:
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(device)
        return (time.perf_counter() - begin) / steps

    pairs = [(block(raw), block(prepared)) for _ in range(PAIRS)][2:]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def accelerator_for(device: str, **options: Any) -> Accelerator:
    """A fresh accelerator."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=device == "cpu", **options)


def step_row(device: str, steps: int) -> Row:
    """What is added to a step of a model so small that only the host counts."""
    x = torch.randn(8, 16, device=device)

    def stepper(model: nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
        def step() -> None:
            backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        return step

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    accelerator = accelerator_for(device)
    raw = stepper(*parts(), torch.Tensor.backward)
    prepared = stepper(*accelerator.prepare(*parts()), accelerator.backward)
    by_hand, ours = by_turns(device, raw, prepared, steps * 10)
    added = (ours - by_hand) * 1e6
    return Row(f"added to a step of {by_hand * 1e6:.0f} us on the GPU", "us", added, None, 0.0, added, 10.0, "us")


def language_model_row(device: str, layers: int | None) -> Row:
    """A Llama of a billion parameters, bfloat16, compiled: the time of a step by hand over that of a prepared one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = layers is not None
    config = LlamaConfig(
        hidden_size=64 if small else 2048, intermediate_size=128 if small else 8192, num_hidden_layers=layers or 16,
        num_attention_heads=4 if small else 32, num_key_value_heads=2 if small else 8, vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
    )  # fmt: skip
    tokens = torch.randint(0, VOCABULARY, (1 if small else BATCH, 16 if small else TOKENS), device=device)

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        with torch.device(device):
            model = LlamaForCausalLM(config)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")

    model, optimizer = parts()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    compiled: Any = model if small else torch.compile(model)

    def by_hand() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    accelerator = accelerator_for(device, mixed_precision="bf16", dynamo_backend="no" if small else "inductor")
    prepared_model, prepared_optimizer = accelerator.prepare(*parts())

    def prepared() -> None:
        loss = prepared_model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        prepared_optimizer.step()
        prepared_optimizer.zero_grad()

    for step in (by_hand, prepared):  # which compiles
        for _ in range(1 if small else 3):
            step()
    floor, ours = by_turns(device, by_hand, prepared, 1 if small else 5)
    what = f"step of a Llama of {num_parameters / 1e9:.2g} B parameters, bf16, compiled"
    return Row(what, "ms", ours * 1e3, None, floor * 1e3, ours / floor, 1.01)
