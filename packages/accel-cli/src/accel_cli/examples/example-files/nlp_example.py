"""Classify sentences with a BERT, on one process or many: a whole training loop with `accelerate`.

    accelerate launch nlp_example.py
    accelerate launch --num_processes 2 nlp_example.py --mixed_precision fp16
    accelerate launch nlp_example.py --model bert-base-cased --data reviews.csv
    accelerate launch nlp_example.py --model bert-base-cased --data_dir MRPC --learning_rate 2e-5

Without options, a tiny BERT with random weights learns whether a sentence such as "the plot was never dull" praises; the
sentences are generated. The last line is the accuracy on 200 other sentences: at least 0.95.
Needs transformers. `--data` is a CSV file with the columns `text` and `label` (0 or 1); `--data_dir` a folder of MRPC,
with `msr_paraphrase_train.txt` and `msr_paraphrase_test.txt`, or GLUE's `train.tsv` and `dev.tsv`: do two sentences say the same?
"""

import argparse
import csv
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, PreTrainedTokenizerFast

from accelerate import Accelerator
from accelerate.utils import set_seed


def make_rows(count: int = 1000) -> list[dict[str, Any]]:
    """Sentences with label 1 where they praise; a "never" turns the meaning round."""
    draw = random.Random(0)
    praise, blame = ["great", "clever", "moving", "funny"], ["dull", "slow", "shallow", "loud"]
    rows = []
    for _ in range(count):
        word, negation = draw.choice(praise + blame), draw.choice(["", "never "])
        text = (
            f"the {draw.choice(['plot', 'cast', 'music', 'ending'])} {draw.choice(['was', 'felt'])} {negation}{word}"
        )
        rows.append({"texts": (text,), "label": int((word in praise) != bool(negation))})
    return rows


def make_tokenizer(rows: Iterable[dict[str, Any]]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each word."""
    words = sorted({word for row in rows for text in row["texts"] for word in text.split()})
    model = WordLevel({word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def read_mrpc(folder: str) -> list[list[dict[str, Any]]]:
    """Training and evaluation rows of MRPC, as it is published or as GLUE has it: pairs of sentences, and 1 for paraphrases."""
    splits = []
    for names in (("msr_paraphrase_train.txt", "train.tsv"), ("msr_paraphrase_test.txt", "dev.tsv")):
        path = next((Path(folder, name) for name in names if Path(folder, name).exists()), None)
        if path is None:
            raise SystemExit(f"--data_dir {folder}: neither {' nor '.join(names)} is there.")
        with path.open(encoding="utf-8-sig") as file:
            table = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            splits.append(
                [{"texts": (row["#1 String"], row["#2 String"]), "label": int(row["Quality"])} for row in table]
            )
    return splits


def read_rows(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows for training and for evaluation; of one table, the last fifth is for evaluation."""
    if args.data_dir:
        train, evaluation = read_mrpc(args.data_dir)
        return train, evaluation
    rows = make_rows()
    if args.data:
        with open(args.data, newline="") as file:
            rows = [{"texts": (row["text"],), "label": int(row["label"])} for row in csv.DictReader(file)]
    split = len(rows) * 4 // 5
    return rows[:split], rows[split:]


def make_model_and_loaders(args: argparse.Namespace) -> tuple[Any, DataLoader, DataLoader]:
    """The model, training batches, and batches for evaluation."""
    train, evaluation = read_rows(args)
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
    else:
        tokenizer = make_tokenizer(train)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=len(tokenizer), **sizes))

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        texts = map(list, zip(*(row["texts"] for row in batch), strict=True))  # one list, or two for pairs
        encoded = tokenizer(*texts, padding=True, truncation=True, return_tensors="pt")
        return {**encoded, "labels": torch.tensor([row["label"] for row in batch])}

    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    eval_loader = DataLoader(evaluation, batch_size=64, collate_fn=collate)
    return model, train_loader, eval_loader


def evaluate(accelerator: Accelerator, model: Any, loader: DataLoader) -> float:
    """The accuracy; each row counts once, also where the last batch was padded to serve all processes."""
    model.eval()
    correct = total = 0
    for batch in loader:
        with torch.no_grad():
            predicted = model(**batch).logits.argmax(dim=-1)
        predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))
        correct += (predicted == labels).sum().item()
        total += len(labels)
    return correct / total


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of the Hub or a folder, in place of the tiny BERT")
    parser.add_argument("--data", help="a CSV file with the columns text and label")
    parser.add_argument("--data_dir", help="a folder with the files of MRPC, as it is published or as GLUE has it")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16, help="on each process")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as launched")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    if not (args.data or args.data_dir):
        accelerator.print("no --data_dir: sentences that are generated")
    set_seed(0)
    model, train_loader, eval_loader = make_model_and_loaders(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: accuracy {evaluate(accelerator, model, eval_loader):.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
