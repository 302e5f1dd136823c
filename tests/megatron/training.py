"""What the tests of Megatron-LM train, and the same training as plain PyTorch in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import MegatronLMPlugin
from tests.support.leaks import reset_state
from tests.support.ranks import ranks

Case = tuple[str, dict[str, Any], dict[str, Any]]  # a model, fields of the plugin, fields of its configuration
megatron_ranks = partial(ranks, timeout=300.0)  # importing megatron-core takes seconds in every process
TOKENS, LENGTH = 61, 10  # an odd vocabulary, which is padded
SIZES = {
    "vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.2,
}  # fmt: skip
GPT2_SIZES = {
    "vocab_size": TOKENS, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "initializer_range": 0.2,
}  # fmt: skip


def new_model(kind: str = "Llama", seed: int = 0, **options: Any) -> Any:
    """A small model of transformers; the same for the same arguments."""
    import transformers

    if kind == "GPT2":
        config, made = transformers.GPT2Config(**GPT2_SIZES | options), transformers.GPT2LMHeadModel
    else:
        config = getattr(transformers, f"{kind}Config")(**SIZES | options)
        made = getattr(transformers, f"{kind}ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return made(config)


def new_rows(count: int, masked: bool = False) -> list[dict[str, torch.Tensor]]:
    """Sequences; `masked` pads them on the right, each to another length, so that ranks have unequal numbers of tokens."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(count):
        tokens = torch.randint(0, TOKENS, (LENGTH,), generator=generator)
        mask = torch.ones_like(tokens)
        labels = tokens.clone()
        if masked:
            mask[4 + index % 6 :] = 0
            labels[mask == 0] = -100
            labels[: index % 3] = -100
        rows.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return rows


def new_batch(count: int, masked: bool = False) -> dict[str, torch.Tensor]:
    """The same sequences as one batch."""
    return stacked(new_rows(count, masked))


def stacked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@contextmanager
def run_with(plugin: MegatronLMPlugin, **settings: Any) -> Iterator[Accelerator]:
    """An accelerator whose traces are gone afterwards."""
    try:
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin, **settings)
    except BaseException:
        reset_state()
        raise
    try:
        yield accelerator
    finally:
        accelerator.free_memory()
        reset_state()


def optimizer_of(model: Any, kind: str = "AdamW") -> torch.optim.Optimizer:
    """An optimizer with two groups: norms and biases have no weight decay.

    Its eps keeps Adam from blowing up what rounding makes of gradients of almost 0.
    """
    flat = [one for one in model.parameters() if one.ndim < 2]
    matrices = [one for one in model.parameters() if one.ndim >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, lr=0.01, eps=1e-4)
    return made


def plain_training(
    model: Any, rows: list[dict[str, torch.Tensor]], batch: int, clipping: float = 1.0
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step in one process."""
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    found = []
    for one in DataLoader(rows, batch_size=batch):  # type: ignore[arg-type]
        loss = model(**one).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def start(accelerator: Accelerator, model: Any, rows: Any, micro_batch: int, decay: bool = True) -> tuple[Any, ...]:
    """Everything prepared."""
    optimizer = optimizer_of(model)
    count = accelerator.engine.data_shard().count  # schedulers step once per replica
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step // count) if decay else 1.0)
    loader = DataLoader(rows, batch_size=micro_batch)
    return accelerator.prepare(model, optimizer, loader, scheduler)


def train(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, scheduler: Any
) -> list[tuple[float, float]]:
    """The same program as for any engine; loss and gradient norm of each step."""
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found.append((loss.item(), float(norm)))  # type: ignore[arg-type]
    return found


def assert_near(found: list[Any], expected: list[Any], *said: Any, rel: float = 1e-5) -> None:
    """Check that loss and gradient norm of each step are those expected."""
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=rel), (*said, step, found, expected)


def check_run(world: int, new: Callable[[], Any], layout: dict[str, Any], rows: Any, batch: int) -> None:
    """Check that loss and gradient norm of each step are those of one process."""
    of_replica = math.prod(layout.get(name, 1) for name in ("tp_degree", "pp_degree", "context_parallel_size"))
    micro_batch = batch // (world // of_replica) // layout.get("num_micro_batches", 1)
    expected = plain_training(new(), rows, batch)
    with run_with(MegatronLMPlugin(**layout)) as accelerator:
        found = train(accelerator, *start(accelerator, new(), rows, micro_batch))
    assert_near(found, expected, new, layout)


def check_steps(world: int, cases: list[Case], steps: int, batch: int) -> None:
    """Check runs with rows of unequal lengths, so that ranks have unequal numbers of labels."""
    for kind, layout, options in cases:
        check_run(world, partial(new_model, kind, **options), layout, new_rows(steps * batch, masked=True), batch)
