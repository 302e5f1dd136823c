"""The trl library's trainers: on instructions, on preferences, on rewards; with adapters; on two processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import tiny
from tests.clients.trainer import history
from tests.support.ranks import ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl"),
    pytest.mark.filterwarnings("default"),  # the libraries warn each other
]


def settings(folder: Path, **options: Any) -> dict[str, Any]:
    """Arguments that all trainers take."""
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        **options,
    }


def model_folder(folder: Path) -> str:
    """A saved model, because some trainers load it a second time for comparison."""
    if not (folder / "model").exists():
        tiny.llama().save_pretrained(folder / "model")
    return str(folder / "model")


def preferences(count: int) -> dict[str, list[str]]:
    """Some words are liked, others are not."""
    liked, other = tiny.WORDS[:10], tiny.WORDS[10:]

    def text(words: list[str], index: int) -> str:
        return " ".join(words[(index + 3 * position) % len(words)] for position in range(3 + index % 5))

    return {
        "chosen": [text(liked, index) for index in range(count)],
        "rejected": [text(other, index) for index in range(count)],
    }


def make_sft(folder: Path, **options: Any) -> Any:
    import trl
    from datasets import Dataset

    peft_config = options.pop("peft_config", None)
    return trl.SFTTrainer(
        model=model_folder(folder),
        args=trl.SFTConfig(max_length=32, **settings(folder, **options)),
        processing_class=tiny.tokenizer(),
        train_dataset=Dataset.from_dict({"text": tiny.sentences(32)}),
        eval_dataset=Dataset.from_dict({"text": tiny.sentences(7)}),
        peft_config=peft_config,
    )


def make_dpo(folder: Path, **options: Any) -> Any:
    import trl
    from datasets import Dataset

    return trl.DPOTrainer(
        model=model_folder(folder),
        args=trl.DPOConfig(max_length=32, beta=0.5, **settings(folder, **options)),
        processing_class=tiny.tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": tiny.sentences(32), **preferences(32)}),
    )


def make_grpo(folder: Path, **options: Any) -> Any:
    import trl
    from datasets import Dataset

    def many_words(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    return trl.GRPOTrainer(
        model=model_folder(folder),
        reward_funcs=many_words,
        args=trl.GRPOConfig(max_completion_length=8, num_generations=2, beta=0.1, **settings(folder, **options)),
        processing_class=tiny.tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": tiny.sentences(16)}),
    )


def make_reward(folder: Path, **options: Any) -> Any:
    import transformers
    import trl
    from datasets import Dataset

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**tiny.LLAMA, num_labels=1, pad_token_id=0)
    return trl.RewardTrainer(
        model=transformers.LlamaForSequenceClassification(config),
        args=trl.RewardConfig(max_length=32, **settings(folder, **options)),
        processing_class=tiny.tokenizer(),
        train_dataset=Dataset.from_dict(preferences(32)),
    )


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [make_sft, make_dpo, make_reward])
def test_losses_fall(make: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=8)
    trainer.train()
    losses = history(trainer, "loss")
    assert len(losses) == 8
    assert losses[-1] < losses[0]


@pytest.mark.takes_turns
def test_what_is_generated_is_rewarded(tmp_path: Path) -> None:
    trainer = make_grpo(tmp_path, num_iterations=2, steps_per_generation=2, max_steps=8)  # each answer serves 4 steps
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    assert len(history(trainer, "loss")) == 8
    assert len(history(trainer, "reward")) == 2
    assert all(1 <= reward <= 8 for reward in history(trainer, "reward"))
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())


@pytest.mark.takes_turns
def test_an_adapter_is_trained_and_saved_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make_sft(tmp_path, peft_config=adapter, max_steps=8, learning_rate=5e-2)
    trainer.train()
    assert history(trainer, "loss")[-1] < history(trainer, "loss")[0]
    trainer.save_model(str(tmp_path / "adapter"))
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    loaded = peft.PeftModel.from_pretrained(tiny.llama(), tmp_path / "adapter").eval()
    words = torch.tensor([[4, 5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(words).logits, trainer.model.eval()(words).logits)


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of one process with batches of eight."""
    from tests.support.leaks import reset_state

    found = {}
    for make in (make_sft, make_dpo):
        reset_state()
        trainer = make(tmp_path_factory.mktemp("one"), per_device_train_batch_size=8)
        trainer.train()
        found[make.__name__] = history(trainer, "loss")
    reset_state()
    return found


@pytest.mark.thorough
@ranks(2)
def test_two_processes_learn_like_one(rank: int, of_one_process: dict[str, list[float]], tmp_path: Path) -> None:
    import torch.distributed as dist

    from accelerate.state import AcceleratorState, GradientState

    warnings.simplefilter("ignore")
    if rank == 0:
        model_folder(tmp_path)
    dist.barrier()
    for make in (make_sft, make_dpo):
        AcceleratorState._reset_state(), GradientState._reset_state()
        trainer = make(tmp_path, seed=42)
        trainer.train()
        assert history(trainer, "loss") == pytest.approx(of_one_process[make.__name__], abs=1e-4)
        if make is make_sft:
            assert trainer.evaluate()["eval_loss"] > 0
    AcceleratorState._reset_state(), GradientState._reset_state()
    trainer = make_grpo(tmp_path)
    trainer.train()
    rewards: list[Any] = [None, None]
    dist.all_gather_object(rewards, history(trainer, "reward"))
    assert len(rewards[0]) == 4
    weights: list[Any] = [None, None]
    dist.all_gather_object(weights, {name: tensor.sum().item() for name, tensor in trainer.model.state_dict().items()})
    assert weights[0] == weights[1]


@pytest.mark.thorough
@pytest.mark.launch
def test_its_command_launches_with_our_options(tmp_path: Path) -> None:
    """`trl sft` takes our parser and hands over to our launcher."""
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": text}) for text in tiny.sentences(16)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(lines))
    tiny.tokenizer().save_pretrained(model_folder(tmp_path))
    options = {
        "num_processes": 2, "model_name_or_path": tmp_path / "model", "dataset_name": tmp_path / "data", "max_steps": 3,
        "per_device_train_batch_size": 2, "logging_steps": 1, "output_dir": tmp_path / "out", "bf16": False,
        "report_to": "none", "gradient_checkpointing": False,
    }  # fmt: skip
    command = [str(Path(sys.executable).with_name("trl")), "sft", "--cpu", "--use_cpu"]
    run = subprocess.run(
        [*command, *(f"--{name}={value}" for name, value in options.items())],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["global_step"] == 3
    assert state["epoch"] == pytest.approx(3 * 2 * 2 / 16), "two processes shared the sentences"
