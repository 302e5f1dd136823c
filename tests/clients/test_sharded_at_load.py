"""Models that transformers has sharded while it loaded them: trained as in one process, or refused before they change."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state.accelerator_state import AcceleratorState
from accel_state.mesh import ParallelismConfig
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accelerate import Accelerator
from tests.clients import tiny
from tests.support.ranks import ranks

transformers = pytest.importorskip("transformers", minversion="5.20")

ROWS = torch.randint(0, 64, (16, 12), generator=torch.Generator().manual_seed(1))
STEPS = 4


def load(folder: Path, **sizes: int) -> Any:
    from transformers.distributed import DistributedConfig

    options = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)


def sgd(model: Any) -> torch.optim.Optimizer:
    """Its steps are linear in the gradients, so that differences of rounding stay small."""
    return torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], 0.5, momentum=0.9)


def steps_of(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, saved: tuple[int, Path] | None = None
) -> list[tuple[float, float]]:
    """The loss of all samples of each step, and the norm of the gradients; `saved` says before which step to save, and where."""
    steps: list[tuple[float, float]] = []
    for rows in loader:
        if saved is not None and len(steps) == saved[0]:
            accelerator.save_state(saved[1])
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        norm: Any = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        steps.append((accelerator.reduce(loss.detach(), "mean").item(), norm.item()))
    return steps


def steps_of_one_process(
    folder: Path, make_optimizer: Any = adamw, change: Any = None, samples: torch.Tensor = ROWS
) -> list[tuple[float, float]]:
    model = load(folder) if change is None else change(load(folder))
    optimizer = make_optimizer(model)
    steps = []
    for rows in samples.split(4):
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
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    accelerator.save_state(tmp_path / "state")
    torch.testing.assert_close(
        torch.tensor(steps_of(accelerator, model, optimizer, loader)), torch.tensor(expected), atol=1e-5, rtol=2e-5
    )
    accelerator.load_state(tmp_path / "state")
    again = steps_of(accelerator, model, optimizer, loader)
    torch.testing.assert_close(torch.tensor(again), torch.tensor(expected), atol=1e-5, rtol=2e-5)


EXPERTS: list[tuple[dict[str, int], dict[str, int]]] = [
    ({"ep_size": 4, "fsdp_size": 4}, {"dp_shard_size": 4}),
    ({"ep_size": 2, "tp_size": 2, "fsdp_size": 2}, {"tp_size": 2, "dp_shard_size": 2}),
    ({"ep_size": 4, "tp_size": 4}, {"tp_size": 4}),
]


@pytest.mark.sample(1)
@ranks(4)
@pytest.mark.parametrize("first", range(len(EXPERTS)))
def test_experts_that_arrive_sharded_train_and_go_on_at_another_layout(
    rank: int, world: int, tmp_path: Path, first: int
) -> None:
    """The last step sends every token to the same experts, so that others get none."""
    samples = torch.cat([ROWS[:12], torch.full_like(ROWS[:4], 7)])
    if rank == 0:
        mixtral_config = transformers.MixtralConfig(
            **{**tiny.LLAMA, "num_key_value_heads": 4}, num_local_experts=4, num_experts_per_tok=1
        )
        torch.manual_seed(0)
        transformers.MixtralForCausalLM(mixtral_config).save_pretrained(tmp_path / "model")
    for turn, (arrives, config) in enumerate([EXPERTS[first], EXPERTS[(first + 1) % len(EXPERTS)]]):
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**config))
        accelerator.wait_for_everyone()
        expected = steps_of_one_process(tmp_path / "model", sgd, samples=samples)
        model = load(tmp_path / "model", **arrives)
        loader: Any = torch.utils.data.DataLoader(samples, batch_size=4 * config.get("tp_size", 1) // world)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
        if turn:
            accelerator.load_state(tmp_path / "state")
            loader = accelerator.skip_first_batches(loader, 2)
        steps = steps_of(accelerator, model, optimizer, loader, saved=None if turn else (2, tmp_path / "state"))
        torch.testing.assert_close(torch.tensor(steps), torch.tensor(expected[2 * turn :]), atol=1e-6, rtol=1e-5)
        accelerator.free_memory()
        AcceleratorState._reset_state()


@pytest.mark.sample(1)
@ranks(2)
@pytest.mark.parametrize("version", [None, 2])
def test_adapters_that_were_added_to_shards_get_the_mean_of_the_gradients(
    rank: int, world: int, tmp_path: Path, version: int | None
) -> None:
    """Each rank draws other weights for them, and accumulates two batches for a step."""
    peft = pytest.importorskip("peft")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version) if version else None
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        parallelism_config=ParallelismConfig(dp_shard_size=2),
        gradient_accumulation_steps=2,
    )
    if rank == 0:
        tiny.llama().save_pretrained(tmp_path / "model")
    accelerator.wait_for_everyone()

    def adapted(model: Any, seed: int) -> Any:
        torch.manual_seed(seed)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )

    expected = steps_of_one_process(tmp_path / "model", sgd, partial(adapted, seed=0))
    model = adapted(load(tmp_path / "model", fsdp_size=2), seed=rank)
    loader: Any = torch.utils.data.DataLoader(ROWS, batch_size=1)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    steps = []
    for rows in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=rows, labels=rows).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                steps.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(torch.tensor(steps), torch.tensor([norm for _, norm in expected]), atol=1e-6, rtol=1e-5)
    weights = [weight.detach() for weight in model.parameters() if weight.requires_grad]
    for weight in weights:
        torch.testing.assert_close(accelerator.gather(weight[None]), weight[None].repeat(2, 1, 1), rtol=0, atol=0)


@ranks(4)
@pytest.mark.filterwarnings("ignore")
def test_trainer_takes_the_steps_of_one_process_and_resumes_what_a_callback_saved(
    rank: int, world: int, tmp_path: Path
) -> None:
    """It says how the model is sharded, passes no FSDP plugin, and writes no checkpoint of such a model by itself."""

    class InOrder(transformers.Trainer):  # type: ignore[name-defined, misc]
        """Reads its samples in order."""

        def _get_train_sampler(self, *args: Any, **options: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    class States(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
        """Saves the state after the second step, or loads it before the first."""

        trainer: Any

        def __init__(self, loads: bool) -> None:
            self.loads = loads

        def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            if self.loads:
                self.trainer.accelerator.load_state(tmp_path / "state")

        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            if not self.loads and state.global_step == 2:
                self.trainer.accelerator.save_state(tmp_path / "state")

    def steps_of_trainer(rows: torch.Tensor, loads: bool) -> list[tuple[float, float]]:
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=len(rows) // 4,
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
        samples = [{"input_ids": row, "labels": row.clone()} for row in rows]
        callback = States(loads)
        model = load(tmp_path / "model", tp_size=2, fsdp_size=2)
        callback.trainer = InOrder(model, arguments, train_dataset=samples, callbacks=[callback])
        callback.trainer.train()
        history = callback.trainer.state.log_history
        return [(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]

    if rank == 0:
        tiny.llama().save_pretrained(tmp_path / "model")
    torch.distributed.barrier()
    expected = torch.tensor(steps_of_one_process(tmp_path / "model"))
    torch.testing.assert_close(torch.tensor(steps_of_trainer(ROWS, loads=False)), expected, atol=1e-5, rtol=2e-5)
    resumed = steps_of_trainer(ROWS[8:], loads=True)
    torch.testing.assert_close(torch.tensor(resumed), expected[2:], atol=1e-5, rtol=2e-5)


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
