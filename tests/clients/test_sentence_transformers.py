"""The sentence-transformers library: sentences become vectors, and similar ones come closer."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import tiny
from tests.clients.trainer import history
from tests.support.ranks import ranks

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("sentence_transformers") is None, reason="needs sentence-transformers"
    ),
    pytest.mark.filterwarnings("default"),  # the libraries warn each other
]


@pytest.mark.takes_turns
def test_the_library_accepts_this_accelerate_for_training() -> None:
    """It asks whose home page our metadata name."""
    from sentence_transformers.util import is_training_available

    assert is_training_available()


def make_trainer(folder: Path, base: Path, **options: Any) -> Any:
    """A trainer on pairs of sentences, each pair with how alike they are."""
    Dataset = pytest.importorskip("datasets").Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    words = Transformer(str(base), max_seq_length=32)
    model = SentenceTransformer(modules=[words, Pooling(32, "mean")], device="cpu")
    firsts = tiny.sentences(32)
    seconds = [firsts[index] if index % 2 else firsts[(index + 5) % 32] for index in range(32)]
    data = Dataset.from_dict({"first": firsts, "second": seconds, "score": [float(index % 2) for index in range(32)]})
    arguments = SentenceTransformerTrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 4,
            "max_steps": 8,
            "logging_steps": 1,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "constant",
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "save_strategy": "no",
            "bf16": False,
            **options,
        },
    )
    return SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data.select(range(16)),
        loss=CosineSimilarityLoss(model),
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder without dropout, so that its batches can be compared."""
    return tiny.save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def of_one_process(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process."""
    trainer = make_trainer(tmp_path_factory.mktemp("one"), base)
    trainer.train()
    return history(trainer, "loss")


@pytest.mark.takes_turns
def test_sentences_are_encoded_alike_after_saving(base: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    trainer = make_trainer(tmp_path, base)
    before = trainer.model.encode(tiny.sentences(9), batch_size=4, show_progress_bar=False)
    trainer.train()
    after = trainer.model.encode(tiny.sentences(9), batch_size=4, show_progress_bar=False)
    assert before.shape == after.shape == (9, 32)
    assert abs(after - before).max() > 1e-3
    assert history(trainer, "loss")[-1] < history(trainer, "loss")[0]
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.save_model(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert torch.allclose(
        torch.tensor(again.encode(tiny.sentences(9), show_progress_bar=False)), torch.tensor(after), atol=1e-6
    )


@pytest.mark.thorough
@ranks(2)
def test_two_processes_learn_like_one(rank: int, base: Path, of_one_process: list[float], tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    trainer = make_trainer(tmp_path, base, per_device_train_batch_size=4)
    trainer.train()
    assert history(trainer, "loss") == pytest.approx(of_one_process, abs=1e-4)
    assert trainer.evaluate()["eval_loss"] > 0
