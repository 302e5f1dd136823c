"""Train on a device mesh with the Trainer of transformers: FSDP2 shards, replicas, tensor and context parallelism.

    accelerate launch --num_processes 2 nd_parallel_trainer.py --tp_size 2
    accelerate launch --num_processes 8 nd_parallel_trainer.py --dp_shard_size 4 --tp_size 2 --model meta-llama/Llama-3.2-1B
    accelerate launch --config_file configs/tp_hsdp.yaml nd_parallel_trainer.py

What differs from any other use of the Trainer: `TrainingArguments(parallelism_config=...)`. The loop is the Trainer's. The
product of the sizes is the number of processes; sizes may come from the launch, and without any, all processes are
replicas. Without `--model`, a tiny Llama
learns to count. The last line is a loss below 0.2. Needs transformers.
"""

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from accelerate import ParallelismConfig, PartialState
from accelerate.utils import set_seed


def make_sequences(count: int, length: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Numbers that grow by one, each sequence of shape (length,)."""
    starts = torch.randint(vocabulary, (count,))
    rows = [torch.arange(start, start + length) % vocabulary for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def make_model(name: str | None) -> Any:
    """The named model, or a tiny Llama with random weights."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes))


def main() -> None:
    """Train, and print the loss of the last epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    launched = ParallelismConfig()  # what a config file of the launch says
    replicas = launched.dp_replicate_size if launched.total_size > 1 else None
    parser.add_argument(
        "--dp_replicate_size",
        "--dp-replicate-size",
        type=int,
        default=replicas,
        help="replicas; default: what is left",
    )
    parser.add_argument(
        "--dp_shard_size",
        "--dp-shard-size",
        type=int,
        default=launched.dp_shard_size,
        help="shards of a replica (FSDP2)",
    )
    parser.add_argument(
        "--tp_size", "--tp-size", type=int, default=launched.tp_size, help="ranks that share each layer"
    )
    parser.add_argument(
        "--cp_size", "--cp-size", type=int, default=launched.cp_size, help="ranks that share each sequence"
    )
    parser.add_argument("--model", help="a causal language model of the Hub or a folder")
    parser.add_argument("--length", "--sequence-length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=8, help="of each rank that reads data")
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--output_dir", default="runs/nd_parallel_trainer")
    args = parser.parse_args()

    state = PartialState()
    others = args.dp_shard_size * args.tp_size * args.cp_size
    config = ParallelismConfig(
        dp_replicate_size=args.dp_replicate_size or state.num_processes // others,
        dp_shard_size=args.dp_shard_size,
        tp_size=args.tp_size,
        cp_size=args.cp_size,
    )
    sharding: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}} if args.dp_shard_size > 1 else {}
    settings = TrainingArguments(
        args.output_dir,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        logging_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=state.device.type == "cpu",
        parallelism_config=config if config.total_size > 1 else None,
        **sharding,
    )
    set_seed(0)
    model = make_model(args.model)
    sequences = make_sequences(256, args.length, model.config.vocab_size)
    trainer = Trainer(model=model, args=settings, train_dataset=sequences)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    state.print(f"final loss {float(losses[-1]):.4f}")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
