"""What the tests of client libraries train: models of a few thousand parameters, sentences, a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

WORDS = [
    "the",
    "a",
    "small",
    "big",
    "red",
    "green",
    "cat",
    "dog",
    "bird",
    "sees",
    "hears",
    "likes",
    "finds",
    "today",
    "often",
    "never",
    "and",
    "but",
    "then",
    "there",
]
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "sdpa",
}


def llama(seed: int = 0, **options: Any) -> Any:
    """A causal language model of the transformers library; the same for the same arguments."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **options}))


class Sequences(Dataset[dict[str, Any]]):
    """Token sequences of different lengths whose tokens follow from one another."""

    def __init__(self, count: int, start: int = 0) -> None:
        self.rows = [self._row(index) for index in range(start, start + count)]

    @staticmethod
    def _row(index: int) -> list[int]:
        length = 5 + (index * 7) % 11
        return [(index * 5 + position * 3) % 60 + 1 for position in range(length)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Stream(IterableDataset[dict[str, Any]]):
    """The same sequences without a length."""

    def __init__(self, count: int) -> None:
        self.sequences = Sequences(count)

    def __iter__(self) -> Any:
        return iter([self.sequences[index] for index in range(len(self.sequences))])


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of shape (rows, longest row); 0 pads tokens, -100 labels."""

    def stack(name: str, value: int) -> torch.Tensor:
        longest = max(len(row[name]) for row in rows)
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    tokens = stack("input_ids", 0)
    return {"input_ids": tokens, "labels": stack("labels", -100), "attention_mask": (tokens != 0).long()}


def sentences(count: int) -> list[str]:
    """Sentences of four to eleven known words."""
    return [
        " ".join(WORDS[(index * 3 + position * (1 + index % 4)) % len(WORDS)] for position in range(4 + index % 8))
        for index in range(count)
    ]


def tokenizer() -> Any:
    """A tokenizer that knows `WORDS`, the letters and how to write a conversation."""
    import tokenizers
    import transformers

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    names = [*special, *WORDS, "user", "assistant", ":", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.decoder = tokenizers.decoders.WordPiece(prefix="##", cleanup=False)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    wrapped.chat_template = (
        "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} {{ eos_token }} {% endfor %}"
        "{% if add_generation_prompt %}assistant : {% endif %}"
    )
    return wrapped


def save_bert(folder: Path) -> Path:
    """A tiny encoder without dropout and its tokenizer, in the layout of the transformers library."""
    import transformers

    words = tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=64, pad_token_id=words.pad_token_id,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        transformers.BertModel(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
