"""Checks that models split into pipeline stages have the output of one process: `prepare_pippy`.

By itself: `accelerate launch --num_processes 2 .../external_deps/test_pippy.py`. The models of transformers are left out
where it is not installed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from accelerate.inference import prepare_pippy
from accelerate.state import PartialState
from accelerate.test_utils.scripts.checks.check import Process, SkippedError, checks
from accelerate.test_utils.scripts.checks.running import run_checks
from accelerate.utils import is_transformers_available

WORDS, LENGTH, WIDTH = 32, 10, 16


def compare(process: Process, make: Any, given: dict[str, torch.Tensor], **settings: Any) -> None:
    """Compare the output of a model split into stages with that of the full model.

    Args:
        process: Where the check runs.
        make: Makes the model, the same every time.
        given: A batch.
        settings: For `prepare_pippy`.
    """
    if process.world == 1:
        raise SkippedError("a pipeline needs several processes")
    state = PartialState()
    with torch.no_grad():
        expected = tensor_of(make()(**given))
        model = prepare_pippy(make(), example_kwargs=given, gather_output=True, **settings)
        output = tensor_of(model(**{name: value.to(state.device) for name, value in given.items()}))
    assert torch.allclose(output.float().cpu(), expected, atol=1e-4), "the output differs from that of one process"


def tensor_of(output: Any) -> torch.Tensor:
    """The output of a model, which models of transformers wrap."""
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output["logits"]
    return logits


def seeded(make: Any) -> nn.Module:
    """Make a model with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = make()
        return model.eval()


class Chain(nn.Module):
    """Blocks one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(batch, words) to logits, (batch, words, vocabulary)."""
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def words(batch_size: int) -> dict[str, torch.Tensor]:
    """A batch of random words."""
    return {"input_ids": torch.randint(0, WORDS, (batch_size, LENGTH), generator=torch.Generator().manual_seed(1))}


def chain(process: Process) -> None:
    """A model with a chain of blocks."""
    compare(process, lambda: seeded(Chain), words(4))


def uneven(process: Process) -> None:
    """A batch that does not divide by the number of chunks."""
    compare(process, lambda: seeded(Chain), words(3), num_chunks=2)


def make_of_transformers(name: str, **sizes: int) -> Any:
    """Make a function that makes a small model of transformers.

    Raises:
        SkippedError: The library is not installed.
    """
    if not is_transformers_available():
        raise SkippedError("needs transformers")
    import transformers

    kind: Any = getattr(transformers, name)
    return lambda: seeded(lambda: kind(kind.config_class(vocab_size=WORDS, **sizes)))


def bert(process: Process) -> None:
    """A classifier of sentences."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    compare(process, make_of_transformers("BertForSequenceClassification", **sizes), words(4))


def gpt2(process: Process) -> None:
    """A language model."""
    sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    compare(process, make_of_transformers("GPT2LMHeadModel", **sizes), words(4))


PIPELINES = checks("pipelines", chain=chain, uneven_batch=uneven, bert=bert, gpt2=gpt2)


def main() -> int:
    """Run these checks, print a table, and return the exit status: 0 when none failed."""
    return run_checks(PIPELINES)


if __name__ == "__main__":
    sys.exit(main())
