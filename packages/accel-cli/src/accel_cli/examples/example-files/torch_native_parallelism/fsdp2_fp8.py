"""Train with FSDP2 and FP8: matrices are multiplied in 8-bit floats of torchao, and all-gathered in them.

    accelerate launch --num_processes 2 fsdp2_fp8.py
    accelerate launch --num_processes 8 fsdp2_fp8.py --model meta-llama/Llama-3.2-1B
    accelerate launch --num_processes 2 fsdp2_fp8.py --precision bf16

FP8 needs a GPU of compute capability 8.9 or higher; elsewhere it is emulated, which shows what the rounding does to a model,
and is slower. All linear layers of the model are converted but the first and the last. Without `--model`, a tiny Llama learns
to count. The last line is a loss below 0.3. Needs torchao and transformers.
"""

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchao.float8 import Float8LinearConfig
from transformers import AutoModelForCausalLM, LlamaConfig

from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import AORecipeKwargs, set_seed


def make_model(name: str | None) -> Any:
    """The named model, or a tiny Llama with random weights; sizes of layers are multiples of 16, as FP8 wants them."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes))


def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies in 8-bit floats."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def main() -> None:
    """Train, and print the loss of each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["no", "bf16", "fp8"], default="fp8", help="mixed precision")
    parser.add_argument("--model", help="a causal language model of the Hub or a folder")
    parser.add_argument("--length", "--sequence-length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--num_steps", "--num-steps", type=int, help="optimizer steps of one epoch, in place of --epochs"
    )
    parser.add_argument("--log_with", nargs="+", help="names of trackers")
    parser.add_argument("--batch_size", type=int, default=8, help="on each process")
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    args = parser.parse_args()

    state = PartialState()
    sharded = state.num_processes > 1  # one process has nothing to shard
    emulate = not has_fp8(state.device)
    recipe = AORecipeKwargs(
        config=Float8LinearConfig(enable_fsdp_float8_all_gather=sharded and not emulate, emulate=emulate)
    )
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(
        mixed_precision=args.precision,
        fsdp_plugin=plugin if sharded else None,
        kwargs_handlers=[recipe] if args.precision == "fp8" else None,
        log_with=args.log_with,
        project_dir="runs/fsdp2_fp8",
    )
    accelerator.init_trackers("fsdp2_fp8", config={"precision": args.precision, "length": args.length})
    if args.num_steps:
        args.epochs = 1
    set_seed(0)
    model = make_model(args.model)
    count = args.num_steps * args.batch_size * state.num_processes if args.num_steps else 256
    starts = torch.randint(64, (count,))
    sequences = [torch.arange(start, start + args.length) % model.config.vocab_size for start in starts]
    loader = DataLoader([{"input_ids": row, "labels": row} for row in sequences], batch_size=args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    converted = sum(type(module).__name__ == "Float8Linear" for module in model.modules())
    accelerator.print(f"{converted} layers in FP8, {'emulated' if emulate else 'on the GPU'}")

    for epoch in range(args.epochs):
        model.train()
        for step, batch in enumerate(loader, epoch * len(loader)):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if args.log_with:
                accelerator.log({"loss": loss.item()}, step=step)
        accelerator.print(f"epoch {epoch + 1}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
