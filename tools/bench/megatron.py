"""Megatron-LM: a loop written by hand on megatron-core over one through `prepare`, with one schedule and one model.

Both loops clip gradients and update float32 parameters; the weights of one are copied from the other, and their losses are
compared. Time is measured with both in the same processes, memory with each in processes of its own.
"""

from __future__ import annotations

import ctypes
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.ddp import compare
from tools.bench.memory import status_mb
from tools.bench.row import Row
from tools.reference import run_on_ranks

DEGREES = (1, 2)
TOKENS, LENGTH, WIDTH, LAYERS, HEADS = 1024, 64, 256, 4, 4
MICRO_BATCH, MICRO_BATCHES, STEPS = 4, 2, 6
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt
Loop = Callable[[], float]


def rows(reference: Path) -> list[Row]:
    """Measure ours beside megatron-core alone; accelerate 1.15's own path runs with no release of it that is left."""
    found = []
    for degree in DEGREES:
        what = f"tensor parallel size {degree}, {degree} ranks"
        ratio = run_on_ranks(sys.executable, __file__, degree, ("time",))["ratio"]
        found.append(
            Row(f"Megatron-LM samples/s, hand-written over prepared, {what}", "x", ratio, None, 1.0, ratio, 1.03)
        )
        floor, ours = (
            run_on_ranks(sys.executable, __file__, degree, (kind,))["peak"] for kind in ("by hand", "prepared")
        )
        found.append(Row(f"Megatron-LM peak memory, {what}", "MB", ours, None, floor, ours / floor, 1.03))
    return found


def worker(kind: str) -> None:
    """One rank: measure, and let rank 0 print it."""
    import torch

    from accel_integrations.megatron.core import on_cpu
    from accelerate import Accelerator
    from accelerate.utils import MegatronLMPlugin

    warnings.simplefilter("ignore")
    give_memory_back()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    world = torch.distributed.get_world_size()
    plugin = MegatronLMPlugin(tp_degree=world, num_micro_batches=MICRO_BATCHES)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    warm_up(accelerator)
    found: dict[str, float]
    if kind == "time":
        model, prepared = prepared_loop(accelerator)
        with on_cpu():
            hand_written = hand_written_loop(world, model.base_model.state_dict())

        def by_hand() -> float:
            with on_cpu():
                return hand_written()

        first, second = by_hand(), prepared()
        assert abs(first - second) < 1e-4, f"losses differ: {first} and {second}"
        found = {"ratio": compare(by_hand, prepared)["ratio"]}
    else:
        before = status_mb("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
        if kind == "prepared":
            prepared_loop(accelerator)[1]()
        else:
            with on_cpu():
                hand_written_loop(world)()
        found = {"peak": status_mb("VmHWM") - before}
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def warm_up(accelerator: Any) -> None:
    """Run both loops with a tiny model, so that what is loaded on first use is not counted."""
    import gc

    from accel_integrations.megatron.core import on_cpu

    prepared_loop(accelerator, 16)[1]()
    with on_cpu():
        hand_written_loop(accelerator.num_processes, width=16)()
    accelerator.free_memory()
    gc.collect()


def give_memory_back() -> None:
    """Let the C library return large blocks at once when they are freed, so that peaks are those of tensors."""
    library = ctypes.CDLL(None)
    library.mallopt(MMAP_THRESHOLD, 1 << 17)
    library.mallopt(TRIM_THRESHOLD, 0)


def batches() -> list[Any]:
    """The tokens of each step, int64 (samples, tokens)."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, TOKENS, (MICRO_BATCH * MICRO_BATCHES, LENGTH), generator=generator) for _ in range(STEPS)]


def prepared_loop(accelerator: Any, width: int = WIDTH) -> tuple[Any, Loop]:
    """The prepared model, and a loop as for any engine; the mean loss of its steps."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, max_position_embeddings=LENGTH, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    data = batches()

    def loop() -> float:
        losses = []
        for tokens in data:
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    return model, loop


def hand_written_loop(world: int, weights: dict[str, Any] | None = None, width: int = WIDTH) -> Loop:
    """The same on megatron-core: its schedule, its data parallelism, an optimizer of torch; the mean loss of its steps."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    off = ("gradient_accumulation_fusion", "bias_activation_fusion", "masked_softmax_fusion", "bias_dropout_fusion",
           "apply_rope_fusion", "persist_layer_norm", "cross_entropy_loss_fusion")  # fmt: skip
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=width, num_attention_heads=HEADS, num_query_groups=HEADS, ffn_hidden_size=4 * width,
        normalization="RMSNorm", layernorm_epsilon=1e-6, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, hidden_dropout=0.0, attention_dropout=0.0, calculate_per_token_loss=True,
        use_cpu_initialization=True, tensor_model_parallel_size=world, **dict.fromkeys(off, False),
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=TOKENS, max_sequence_length=LENGTH,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    )  # fmt: skip
    if weights is not None:
        model.load_state_dict(weights, strict=False)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    config.finalize_model_grads_func = finalize_model_grads
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    run, data = get_forward_backward_func(), batches()
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    positions = torch.arange(LENGTH).expand(MICRO_BATCH, -1)
    group = parallel_state.get_model_parallel_group()
    first = parallel_state.get_tensor_model_parallel_rank() == 0

    def forward_step(iterator: Any, model: Any) -> Any:
        tokens = next(iterator)
        labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
        losses = model(tokens, positions, hidden, labels=labels)

        def loss_function(losses: Any) -> Any:
            loss = losses[:, :-1].float().sum()
            return loss, torch.tensor(MICRO_BATCH * (LENGTH - 1), dtype=torch.int), {"loss": loss.detach().clone()}

        return losses, loss_function

    def loop() -> float:
        found = []
        for tokens in data:
            wrapped.zero_grad_buffer()
            stored = run(
                forward_step_func=forward_step, data_iterator=iter(tokens.chunk(MICRO_BATCHES)), model=wrapped,
                num_microbatches=MICRO_BATCHES, seq_length=LENGTH, micro_batch_size=MICRO_BATCH, forward_only=False,
            )  # fmt: skip
            squares = [
                one.main_grad.square().sum()
                for one in parameters
                if first or getattr(one, "tensor_model_parallel", False)
            ]
            total = torch.stack(squares).sum()
            torch.distributed.all_reduce(total, group=group)
            factor = torch.clamp(1.0 / (total.sqrt() + 1e-6), max=1.0)
            for one in parameters:
                one.grad = one.main_grad.mul_(factor)
            optimizer.step()
            for one in parameters:
                one.grad = None
            mean = torch.stack([one["loss"] for one in stored]).sum() / (tokens.shape[0] * (LENGTH - 1))
            found.append(mean.item())
        return sum(found) / len(found)

    return loop


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))  # where this file would stand for the package of megatron-core
    worker(sys.argv[1])
