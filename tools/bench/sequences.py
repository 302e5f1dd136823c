"""Sequence parallelism: a step beside a hand-written Ulysses loop in the same two processes, what is sent, and activations."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tools.bench.ddp import compare
from tools.bench.row import Row
from tools.reference import run_on_ranks

LENGTH, STEPS = 1024, 4
LONG = 32 * 1024


def rows(reference: Path) -> list[Row]:
    """Measure our loop against the hand-written one; accelerate 1.15 shards sequences with DeepSpeed only."""
    figures = run_on_ranks(sys.executable, __file__)
    step, sent, held = figures["step"]["ratio"], figures["sent"], figures["held"]
    return [
        Row("Sequence parallel step over a hand-written one, 2 ranks", "x", step, None, 1.0, step, 1.1),
        Row("Bytes that a rank sends in attention, over four all-to-alls of Ulysses", "x", sent, None, 1.0, sent, 1.0),
        Row("Activations of a rank, over a half of one process's, 32 k tokens", "x", held, None, 1.0, held, 1.1),
    ]


def make_model(**sizes: Any) -> Any:
    """A tiny Llama, the same on all ranks."""
    import torch
    import transformers

    torch.manual_seed(0)
    settings = {
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "use_cache": False,
        "max_position_embeddings": LONG,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **sizes})).train()


def hand_written_attention() -> str:
    """Register attention with all-to-alls around it, as one writes it for a causal model without padding."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import scaled_dot_product_attention
    from transformers.modeling_utils import AttentionInterface

    class AllToAll(torch.autograd.Function):
        """Sends row i of the first dimension to rank i."""

        @staticmethod
        def forward(context: Any, rows: Any) -> Any:
            received = torch.empty_like(rows)
            dist.all_to_all_single(received, rows)
            return received

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            return AllToAll.apply(gradient.contiguous())

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        size = dist.get_world_size()
        full = []
        for states in (query, key, value):
            batch, heads, length, width = states.shape
            rows = states.view(batch, size, heads // size, length, width).transpose(0, 1).contiguous()
            received = AllToAll.apply(rows).permute(1, 2, 0, 3, 4)
            full.append(received.reshape(batch, heads // size, size * length, width))
        output = scaled_dot_product_attention(*full, is_causal=True, scale=options.get("scaling"))
        rows = output.view(batch, heads // size, size, length, width).permute(2, 0, 3, 1, 4).contiguous()
        return AllToAll.apply(rows).permute(1, 2, 0, 3, 4).reshape(batch, length, heads, width), None

    AttentionInterface.register("hand_written", attend)
    return "hand_written"


def worker() -> None:
    """One rank: measure, and let rank 0 print."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy, pad
    from torch.nn.parallel import DistributedDataParallel

    from accelerate import Accelerator
    from accelerate.utils import ParallelismConfig

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2))
    rank = accelerator.process_index

    def shards(length: int) -> tuple[dict[str, Any], Any]:
        tokens = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(1))
        labels = pad(tokens[:, 1:], (0, 1), value=-100)
        batch = {"input_ids": tokens, "position_ids": torch.arange(length)[None]}
        return {name: tensor.chunk(2, 1)[rank] for name, tensor in batch.items()}, labels.chunk(2, 1)[rank]

    batch, labels = shards(LENGTH)

    def steps(model: Any, optimizer: Any) -> None:
        for _ in range(STEPS):
            loss = cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    plain = make_model()
    plain.set_attn_implementation(hand_written_attention())
    plain = DistributedDataParallel(plain)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    figures: dict[str, Any] = {"step": compare(lambda: steps(plain, plain_optimizer), lambda: steps(model, optimizer))}

    sent = 0
    send = dist.all_to_all_single

    def counted(output: Any, rows: Any, **options: Any) -> Any:
        nonlocal sent
        sent += rows.nbytes
        return send(output, rows, **options)

    dist.all_to_all_single = counted
    model(**batch)
    dist.all_to_all_single = send
    layers, width = 4, 256
    figures["sent"] = sent / (layers * 4 * LENGTH // 2 * width * 4)

    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    batch, labels = shards(LONG)
    model = accelerator.prepare(make_model(**small))
    local = held_bytes(lambda: model(**batch).logits.sum(), model)
    if accelerator.is_main_process:
        whole = make_model(**small)
        figures["held"] = (
            2 * local / held_bytes(lambda: whole(torch.zeros(1, LONG, dtype=torch.long)).logits.sum(), whole)
        )
        print(json.dumps(figures), flush=True)
    accelerator.wait_for_everyone()


def held_bytes(forward: Any, model: Any) -> int:
    """The bytes of memory that a forward pass keeps for its backward pass, without the parameters."""
    import torch

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()  # keeps the memory, so that no address comes twice
    num_bytes = sum(held.values())
    del output
    return num_bytes


if __name__ == "__main__":
    worker()
