"""Train a language model with DeepSpeed from a JSON config.

    accelerate launch deepspeed_with_config_support.py --config deepspeed_config_templates/zero_stage2_config.json
    accelerate launch --num_processes 2 deepspeed_with_config_support.py --config deepspeed_config_templates/zero_stage3_offload_config.json
    accelerate launch deepspeed_with_config_support.py --config deepspeed_config_templates/zero_stage3_config.json --model gpt2

What differs from any other training: `DeepSpeedPlugin(hf_ds_config=...)`, and that `DummyOptim` and `DummyScheduler` stand for
the optimizer and the scheduler of the file, and say what fills their "auto". With `accelerate launch --use_deepspeed
--deepspeed_config_file FILE` the program needs no plugin. The files are in `deepspeed_config_templates`.
Without `--model`, a tiny GPT-2 learns to count. The last line is a loss below 0.5. Needs deepspeed and transformers. On CPUs, set
DS_BUILD_SHM_COMM=0 to spare the minute in which DeepSpeed compiles something at its first start.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, set_seed

ZERO2 = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}


def make_model(name: str | None) -> Any:
    """The named model, or a tiny GPT-2 with random weights."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name)
    config = GPT2Config(vocab_size=32, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    """Train, and print the loss of the last batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a configuration file of DeepSpeed; ZeRO stage 2 without it")
    parser.add_argument("--model", help="a causal language model of the Hub or a folder")
    parser.add_argument("--output_dir", help="folder for the weights")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=8, help="on each process")
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    args = parser.parse_args()

    config = json.loads(Path(args.config).read_text()) if args.config else ZERO2
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    set_seed(0)
    model = make_model(args.model)
    starts = torch.randint(32, (512,))
    sequences = [torch.arange(start, start + 16) % 32 for start in starts]
    loader = DataLoader([{"input_ids": row, "labels": row} for row in sequences], batch_size=args.batch_size)
    optimizer = DummyOptim(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    scheduler = DummyScheduler(optimizer, total_num_steps=args.epochs * len(loader), warmup_num_steps=10)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.print(f"ZeRO stage {model.zero_optimization_stage()}")

    for epoch in range(args.epochs):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)  # DeepSpeed clips, steps and clears the gradients here
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}")
    if args.output_dir:
        accelerator.save_model(model, args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
