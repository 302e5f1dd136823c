"""Sort sentences by what they are about: a loop in the manner of the example scripts that come with client libraries.

    accelerate launch --cpu --num_processes 2 tests/clients/scripts/classify.py --output_dir runs/classify

The sentences are made up here, the model starts from nothing, and nothing is fetched.
"""

import argparse
import json
import math
from pathlib import Path

import datasets
import torch
import transformers
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, get_scheduler

from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from tests.clients import tiny

logger = get_logger(__name__)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=3)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--max_train_steps", type=int)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--checkpointing_steps", help="a number of optimizer steps, or 'epoch'")
    parser.add_argument("--resume_from_checkpoint", type=Path)
    parser.add_argument("--with_tracking", action="store_true")
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def make_data(accelerator: Accelerator, words: transformers.PreTrainedTokenizerFast) -> datasets.DatasetDict:
    """Sentences as token numbers; the first process does the work, the others find it done."""
    texts = tiny.sentences(130)
    labels = [int("cat" in text or "dog" in text) for text in texts]
    raw = datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"text": texts[:109], "label": labels[:109]}),
        test=datasets.Dataset.from_dict({"text": texts[109:], "label": labels[109:]}),
    )

    def encode(rows: dict[str, list]) -> dict[str, list]:
        return {**words(rows["text"], truncation=True, max_length=32), "labels": rows["label"]}

    with accelerator.main_process_first():
        return raw.map(encode, batched=True, remove_columns=raw["train"].column_names, desc="tokens")


def make_model(words: transformers.PreTrainedTokenizerFast) -> transformers.BertForSequenceClassification:
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, num_labels=2, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def make_optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """Weights decay, biases and norms do not."""
    spared = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [one for name, one in named if not name.endswith(spared)], "weight_decay": 0.01},
        {"params": [one for name, one in named if name.endswith(spared)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate)


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> dict[str, float]:
    model.eval()
    correct = total = 0
    for batch in loader:
        with torch.no_grad():
            predicted = model(**batch).logits.argmax(dim=-1)
        predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))
        correct += (predicted == labels).sum().item()
        total += len(labels)
    return {"accuracy": correct / total, "samples": total}


def load(accelerator: Accelerator, args: argparse.Namespace, steps_per_epoch: int) -> tuple[int, int, int]:
    """Go on from a checkpoint, if one is given: optimizer steps done, epochs done, batches done in the one after."""
    if not args.resume_from_checkpoint:
        return 0, 0, 0
    accelerator.load_state(args.resume_from_checkpoint)
    kind, number = args.resume_from_checkpoint.name.split("_")
    done = (int(number) + 1) * steps_per_epoch if kind == "epoch" else int(number)
    epochs, steps = divmod(done, steps_per_epoch)
    return done, epochs, steps * args.gradient_accumulation_steps


def main() -> None:
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # the same order when going on
        project_dir=args.output_dir,
        **({"log_with": "tensorboard"} if args.with_tracking else {}),
    )
    logger.info(accelerator.state, main_process_only=False)
    (datasets.logging.set_verbosity_warning if accelerator.is_main_process else datasets.logging.set_verbosity_error)()
    set_seed(args.seed)
    if accelerator.is_main_process:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()

    words = tiny.tokenizer()
    data = make_data(accelerator, words)
    collate = DataCollatorWithPadding(words, pad_to_multiple_of=8 if accelerator.mixed_precision != "no" else None)
    train_loader = DataLoader(
        data["train"], shuffle=True, collate_fn=collate, batch_size=args.per_device_train_batch_size
    )
    test_loader = DataLoader(data["test"], collate_fn=collate, batch_size=args.per_device_eval_batch_size)
    model = make_model(words)
    optimizer = make_optimizer(model, args.learning_rate)

    steps_given = args.max_train_steps is not None
    if not steps_given:
        args.max_train_steps = args.num_train_epochs * math.ceil(len(train_loader) / args.gradient_accumulation_steps)
    scheduler = get_scheduler(
        "linear",
        optimizer=optimizer,
        num_warmup_steps=3 * accelerator.num_processes,
        num_training_steps=args.max_train_steps * (accelerator.num_processes if steps_given else 1),
    )
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    # prepared loaders are shorter: each process has its share
    steps_per_epoch = math.ceil(len(train_loader) / args.gradient_accumulation_steps)
    if not steps_given:
        args.max_train_steps = args.num_train_epochs * steps_per_epoch
    args.num_train_epochs = math.ceil(args.max_train_steps / steps_per_epoch)
    if args.with_tracking:
        config = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        accelerator.init_trackers("classify", {name: value for name, value in config.items() if value is not None})

    progress = transformers.utils.logging.tqdm(
        range(args.max_train_steps), disable=not accelerator.is_local_main_process
    )
    done, first_epoch, skipped = load(accelerator, args, steps_per_epoch)
    progress.update(done)

    for epoch in range(first_epoch, args.num_train_epochs):
        model.train()
        train_loader.set_epoch(epoch)
        active = skip_first_batches(train_loader, skipped) if epoch == first_epoch and skipped else train_loader
        losses = []
        for batch in active:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                losses.append(loss.detach())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress.update(1)
                done += 1
                if (
                    args.checkpointing_steps
                    and args.checkpointing_steps.isdigit()
                    and not done % int(args.checkpointing_steps)
                ):
                    accelerator.save_state(args.output_dir / f"step_{done}")
            if done >= args.max_train_steps:
                break
        metric = evaluate(accelerator, model, test_loader)
        average = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
        logger.info(f"epoch {epoch}: {metric}")
        if args.with_tracking:
            accelerator.log({"accuracy": metric["accuracy"], "train_loss": average, "epoch": epoch}, step=done)
        if args.checkpointing_steps == "epoch":
            accelerator.save_state(args.output_dir / f"epoch_{epoch}")

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        words.save_pretrained(args.output_dir)
        (args.output_dir / "all_results.json").write_text(
            json.dumps({**metric, "loss": average, "steps": done, "lr": scheduler.get_last_lr()[0]})
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
