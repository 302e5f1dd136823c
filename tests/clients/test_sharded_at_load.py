"""Models that transformers has sharded while it loaded them: trained as in one process, or refused before they change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state.mesh import ParallelismConfig
from accelerate import Accelerator
from tests.clients import tiny
from tests.support.ranks import ranks

transformers = pytest.importorskip("transformers", minversion="5.20")

ROWS = torch.randint(0, 64, (16, 12), generator=torch.Generator().manual_seed(1))
STEPS = 4


def load(folder: Path, **sizes: int) -> Any:
    from transformers.distributed import DistributedConfig

    options = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def steps_of(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> list[tuple[float, float]]:
    """The loss of all samples of each step, and the norm of the gradients."""
    steps = []
    for rows in loader:
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        norm: Any = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        steps.append((accelerator.reduce(loss.detach(), "mean").item(), norm.item()))
    return steps


def steps_of_one_process(folder: Path) -> list[tuple[float, float]]:
    model = load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    steps = []
    for rows in ROWS.split(4):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps


@pytest.mark.sample(2)
@ranks(4)
@pytest.mark.parametrize(
    ("arrives", "config", "num_readers"),
    [
        ({"tp_size": 2, "fsdp_size": 2}, {"tp_size": 2, "dp_shard_size": 2}, 2),
        ({"tp_size": 2, "fsdp_size": 2}, {"tp_size": 2, "dp_replicate_size": 2}, 2),
        ({"fsdp_size": 4}, {"dp_shard_size": 4}, 4),
        ({"fsdp_size": 2, "dp_replicate_size": 2}, {}, 4),
    ],
)
def test_a_model_that_arrives_sharded_trains_saves_and_goes_on(
    rank: int, world: int, tmp_path: Path, arrives: dict[str, int], config: dict[str, int], num_readers: int
) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**config) if config else None)
    if accelerator.is_main_process:
        tiny.llama().save_pretrained(tmp_path / "model")
    accelerator.wait_for_everyone()
    expected = steps_of_one_process(tmp_path / "model")
    model = load(tmp_path / "model", **arrives)
    loader = torch.utils.data.DataLoader(ROWS, batch_size=4 // num_readers)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0), loader
    )
    accelerator.save_state(tmp_path / "state")
    torch.testing.assert_close(
        torch.tensor(steps_of(accelerator, model, optimizer, loader)), torch.tensor(expected), atol=1e-5, rtol=2e-5
    )
    accelerator.load_state(tmp_path / "state")
    again = steps_of(accelerator, model, optimizer, loader)
    torch.testing.assert_close(torch.tensor(again), torch.tensor(expected), atol=1e-5, rtol=2e-5)


@ranks(4)
@pytest.mark.filterwarnings("ignore")
def test_trainer_takes_the_steps_of_one_process(rank: int, world: int, tmp_path: Path) -> None:
    """It says how the model is sharded, and passes no FSDP plugin."""

    class InOrder(transformers.Trainer):  # type: ignore[name-defined, misc]
        """Reads its samples in order."""

        def _get_train_sampler(self, *args: Any, **options: Any) -> Any:
            return torch.utils.data.SequentialSampler(ROWS)  # type: ignore[arg-type]

    if rank == 0:
        tiny.llama().save_pretrained(tmp_path / "model")
    torch.distributed.barrier()
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    samples = [{"input_ids": row, "labels": row.clone()} for row in ROWS]
    trainer = InOrder(load(tmp_path / "model", tp_size=2, fsdp_size=2), arguments, train_dataset=samples)
    trainer.train()
    steps = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    expected = steps_of_one_process(tmp_path / "model")
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(expected), atol=1e-5, rtol=2e-5)


@ranks(4)
def test_a_model_that_is_sharded_over_other_ranks_is_refused(rank: int, world: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=4))
    model = tiny.llama()
    with pytest.raises(
        ValueError, match="dp_shard_size=4, but LlamaForCausalLM is not sharded, and the 'ddp' engine shards"
    ):
        accelerator.prepare(model)
    if rank == 0:
        model.save_pretrained(tmp_path / "model")
    accelerator.wait_for_everyone()
    model = load(tmp_path / "model", tp_size=2, fsdp_size=2)
    with pytest.raises(
        ValueError, match=r"sharded over 2 ranks by tensor .*=ParallelismConfig\(tp_size=2, dp_shard_size=2\)"
    ):
        accelerator.prepare(model)
