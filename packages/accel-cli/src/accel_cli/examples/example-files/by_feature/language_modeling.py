"""Arguments, texts, tokenizer and model of the programs that train a language model.

    accelerate launch megatron_lm_gpt_pretraining.py --config_name gpt2 --tokenizer_name gpt2 --train_file stories.txt
    accelerate launch deepspeed_with_config_support.py --model_name_or_path gpt2 --dataset_name wikitext-2

Both programs import this file, `language_modeling.py`. Names of models and tokenizers are folders or names on the Hub. Where the
Hub cannot be reached, a line says so: a tiny GPT-2 and words for tokens stand for them, and for a dataset, numbers that count.
`--dataset_name` may be a folder too, whose files have "train" and "valid" in their names, as those of wikitext: `wiki.train.tokens`.
"""

import argparse
import csv
import json
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, PreTrainedTokenizerFast

from accelerate import Accelerator

ROWS: dict[str, Callable[[Any], Iterable[dict[str, str]]]] = {
    ".csv": csv.DictReader,
    ".json": lambda file: map(json.loads, file),
}
"""How the rows of a file are read, by its suffix; each line of any other file is a text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what both programs can be told, by the names of accelerate's own programs and by short ones."""
    parser.add_argument("--model_name_or_path", "--model", help="a causal language model, with its weights")
    parser.add_argument("--config_name", help="a model whose sizes are taken; its weights are random")
    parser.add_argument("--tokenizer_name", help="default: that of the model")
    parser.add_argument("--dataset_name", help="a dataset of the Hub, or a folder of text files")
    parser.add_argument("--dataset_config_name", help="which configuration of the dataset")
    parser.add_argument("--train_file", "--data", help="a text file, or a .csv or .json with the column text")
    parser.add_argument("--validation_file", help="default: a part of the training texts")
    parser.add_argument("--validation_split_percentage", type=int, default=5, help="how large this part is")
    parser.add_argument("--block_size", "--length", type=int, help="tokens of a sequence")
    parser.add_argument("--num_train_epochs", "--epochs", type=int, default=3)
    parser.add_argument("--per_device_train_batch_size", "--batch_size", type=int, default=8, help="of a replica")
    parser.add_argument("--per_device_eval_batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, help="default: 5e-5, and 1e-2 for the tiny model")
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--lr_scheduler_type", default="linear", help="as transformers names schedules")
    parser.add_argument("--num_warmup_steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", help="folder for the trained model and the trackers' files")
    parser.add_argument("--with_tracking", action="store_true", help="use the trackers of --report_to")
    parser.add_argument("--report_to", default="all", help="name of a tracker, or all")


def load(loader: Any, name: str | None, accelerator: Accelerator, substitute: str) -> Any:
    """What a folder or the Hub has under a name; None without a name, and where the Hub cannot be reached."""
    if name is None:
        return None
    try:
        return loader.from_pretrained(name)
    except OSError as error:
        if not isinstance(error.__cause__, LocalEntryNotFoundError):
            raise
    accelerator.print(f"{name!r} is not a folder, and the Hub cannot be reached: {substitute} stands for it.")
    return None


def read_file(path: str | Path) -> list[str]:
    """The texts of a file: its lines, or the values of its column `text`, or else of its first column."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = ROWS.get(Path(path).suffix)
        texts = [row.get("text", next(iter(row.values()))) for row in rows(file)] if rows else list(file)
    return [text for text in texts if text.strip()]


def read_dataset(name: str, configuration: str | None, accelerator: Accelerator) -> list[list[str]]:
    """Training texts and, where a dataset has them, validation texts; nothing where the Hub cannot be reached."""
    if Path(name).is_dir():
        files = [path for path in sorted(Path(name).iterdir()) if path.is_file()]
        return [
            list(chain(*(read_file(path) for path in files if split in path.name))) for split in ("train", "valid")
        ]
    from datasets import load_dataset

    try:
        splits = load_dataset(name, configuration)
    except ConnectionError:
        accelerator.print(f"{name!r} is not a folder, and the Hub cannot be reached: numbers that count stand for it.")
        return []
    return [
        [text for text in splits[split]["text"] if text.strip()]
        for split in ("train", "validation")
        if split in splits
    ]


def read_texts(args: argparse.Namespace, accelerator: Accelerator) -> list[list[str]]:
    """Texts for training and, where there are any of their own, for validation; without files, numbers that count."""
    read = [read_file(path) for path in (args.train_file, args.validation_file) if path]
    if not read and args.dataset_name:
        read = read_dataset(args.dataset_name, args.dataset_config_name, accelerator)
    counting = " ".join(map(str, range(61)))
    return [texts for texts in read if texts] or [[counting] * max(200, args.block_size or 0)]


def make_tokenizer(args: argparse.Namespace, texts: list[str], accelerator: Accelerator) -> Any:
    """The named tokenizer, or one whose tokens are the words of the texts."""
    name = args.tokenizer_name or args.model_name_or_path or args.config_name
    if found := load(AutoTokenizer, name, accelerator, "a tokenizer of the words of the texts"):
        return found
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=4096, special_tokens=["[UNK]", "[EOS]"]))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="[EOS]")


def make_model(args: argparse.Namespace, tokenizer: Any, accelerator: Accelerator) -> Any:
    """The model that was named, one with random weights and the sizes that were named, or a tiny GPT-2."""
    tiny = "a tiny GPT-2 with random weights"
    model = load(AutoModelForCausalLM, args.model_name_or_path, accelerator, tiny)
    config = None if model else load(AutoConfig, args.config_name, accelerator, tiny)
    args.learning_rate = args.learning_rate or (5e-5 if model or config else 1e-2)
    if not (model or config):
        args.block_size = args.block_size or 16
        sizes = {"n_positions": max(32, args.block_size), "n_embd": 32, "n_layer": 2, "n_head": 4}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        end = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
        config = GPT2Config(vocab_size=len(tokenizer), **sizes, **dropout, **end)
    model = model or AutoModelForCausalLM.from_config(config)
    args.block_size = min(args.block_size or 1024, model.config.max_position_embeddings)
    if len(tokenizer) > model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    return model


def make_datasets(
    args: argparse.Namespace, texts: list[list[str]], tokenizer: Any
) -> list[list[dict[str, torch.Tensor]]]:
    """Sequences for training and validation, each of shape (block_size,); models of transformers shift the labels themselves."""
    datasets = []
    for split in texts:
        tokens = torch.tensor(list(chain(*tokenizer(split).input_ids)))
        rows = list(tokens.split(args.block_size))
        datasets.append([{"input_ids": row, "labels": row} for row in rows if len(row) == args.block_size])
    if len(datasets) == 1:
        held_out = max(1, len(datasets[0]) * args.validation_split_percentage // 100)
        datasets = [datasets[0][held_out:], datasets[0][:held_out]]
    if not all(datasets):
        raise SystemExit(
            f"The texts are too short for sequences of {args.block_size} tokens. Give a smaller --block_size."
        )
    return datasets


def evaluate(accelerator: Accelerator, model: Any, loader: Iterable[dict[str, torch.Tensor]]) -> float:
    """The mean loss of the validation sequences."""
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            loss = model(**batch).loss.detach()
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    return torch.cat(losses).mean().item()


def save(accelerator: Accelerator, model: Any, tokenizer: Any, folder: str) -> None:
    """Write a folder from which transformers loads the model and the tokenizer."""
    accelerator.save_model(model, folder)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
