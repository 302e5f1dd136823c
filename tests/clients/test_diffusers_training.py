"""Learning to draw, in the manner of the diffusers library's scripts: averaged weights, hooks, trackers, going on."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration, set_seed
from tests.support.ranks import ranks

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("diffusers", "datasets", "tensorboard")),
    reason="needs diffusers, datasets and tensorboard",
)

STEPS, SAVE_EVERY, ACCUMULATE = 11, 2, 2


def make_unet() -> Any:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, attention_head_dim=4, dropout=0.1,
    )  # fmt: skip


def make_loader(accelerator: Accelerator) -> Any:
    """Pictures of crosses; stored as lists, turned into tensors when read."""
    import datasets

    place = torch.arange(8)
    pictures = [((place[:, None] == row % 8) | (place[None] == row % 7)).long().tolist() for row in range(46)]

    def to_tensors(rows: dict[str, list[Any]]) -> dict[str, list[torch.Tensor]]:
        return {"input": [torch.tensor(picture)[None].float() * 2 - 1 for picture in rows["image"]]}

    with accelerator.main_process_first():
        data = datasets.Dataset.from_dict({"image": pictures}).with_transform(to_tensors)
    return torch.utils.data.DataLoader(data, batch_size=4 // accelerator.num_processes, shuffle=True)


def register_hooks(accelerator: Accelerator, averaged: Any) -> None:
    """Checkpoints hold models in the library's own layout instead of the accelerator's."""
    from diffusers import UNet2DModel
    from diffusers.training_utils import EMAModel

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        if accelerator.is_main_process:
            averaged.save_pretrained(str(Path(folder) / "unet_ema"))
        for model in models:
            if accelerator.is_main_process:
                accelerator.unwrap_model(model).save_pretrained(str(Path(folder) / "unet"))
            weights.pop()

    def load(models: list[Any], folder: str) -> None:
        found = EMAModel.from_pretrained(str(Path(folder) / "unet_ema"), UNet2DModel)
        averaged.load_state_dict(found.state_dict())
        averaged.to(accelerator.device)
        for _ in range(len(models)):
            model = accelerator.unwrap_model(models.pop())
            found = UNet2DModel.from_pretrained(folder, subfolder="unet")
            model.register_to_config(**found.config)
            model.load_state_dict(found.state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def train(folder: Path, resume_from: Path | None = None) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Weights after all steps, as learned and averaged over steps."""
    from diffusers import DDPMPipeline, DDPMScheduler
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel

    AcceleratorState._reset_state(), GradientState._reset_state()
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATE,
        log_with="tensorboard",
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_config=ProjectConfiguration(
            str(folder), logging_dir=str(folder / "logs"), automatic_checkpoint_naming=True, total_limit=3
        ),
    )
    set_seed(5)
    unet, noises = make_unet(), DDPMScheduler(num_train_timesteps=50)
    averaged = EMAModel(unet.parameters(), decay=0.9, model_config=unet.config, model_cls=type(unet))
    register_hooks(accelerator, averaged)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    loader = make_loader(accelerator)
    scheduler = get_scheduler(
        "cosine", optimizer, num_warmup_steps=accelerator.num_processes, num_training_steps=STEPS * ACCUMULATE
    )
    unet, optimizer, loader, scheduler = accelerator.prepare(unet, optimizer, loader, scheduler)
    if accelerator.is_main_process:
        accelerator.init_trackers("drawing", config={"steps": STEPS})
    step = 0
    if resume_from is not None:
        accelerator.load_state(str(resume_from))
        step = SAVE_EVERY * (int(resume_from.name.split("_")[1]) + 1)
    steps_per_epoch = -(-len(loader) // ACCUMULATE)
    while step < STEPS:
        epoch, done = divmod(step, steps_per_epoch)
        unet.train()
        loader.set_epoch(epoch)
        for batch in skip_first_batches(loader, done * ACCUMULATE) if done else loader:
            clean = batch["input"]
            noise = torch.randn_like(clean)
            times = torch.randint(0, 50, (len(clean),), device=clean.device)
            with accelerator.accumulate(unet):
                loss = functional.mse_loss(unet(noises.add_noise(clean, noise, times), times).sample, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            averaged.step(unet.parameters())
            step += 1
            accelerator.log({"loss": loss.item(), "lr": scheduler.get_last_lr()[0]}, step=step)
            if step % SAVE_EVERY == 0:
                accelerator.save_state()
            if step == STEPS:
                break
    accelerator.wait_for_everyone()
    inner = accelerator.unwrap_model(unet)
    weights = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    if accelerator.is_main_process:
        averaged.store(inner.parameters())
        averaged.copy_to(inner.parameters())
        DDPMPipeline(unet=inner, scheduler=noises).save_pretrained(folder / "pipeline")
        averaged.restore(inner.parameters())
    for tracker in accelerator.trackers:
        tracker.finish()
    return weights, averaged.shadow_params


@pytest.mark.thorough
@ranks(1, 2)
def test_pictures_are_learned_and_going_on_changes_nothing(rank: int, world: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True)
    try:
        weights, averaged = train(tmp_path / "whole")
        checkpoints = tmp_path / "whole" / "checkpoints"
        assert sorted(path.name for path in checkpoints.iterdir()) == [f"checkpoint_{n}" for n in (2, 3, 4)]
        assert not list(checkpoints.glob("*/model*.safetensors")), "the hook took the weights out"
        # after eight of eleven steps, amid the second epoch, with averages and dropout under way
        again, averaged_again = train(tmp_path / "resumed", resume_from=checkpoints / "checkpoint_3")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    assert all(torch.equal(one, other) for one, other in zip(averaged, averaged_again, strict=True))
    assert any(not torch.equal(one, other) for one, other in zip(averaged, weights.values(), strict=True))
    if rank == 0:
        check_results(tmp_path / "whole", averaged)


def check_results(folder: Path, averaged: list[torch.Tensor]) -> None:
    """The saved pipeline has the averaged weights and draws; TensorBoard reads what was logged."""
    from diffusers import DDPMPipeline
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pipeline = DDPMPipeline.from_pretrained(folder / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    assert all(torch.equal(one, two) for one, two in zip(pipeline.unet.parameters(), averaged, strict=True))
    assert pipeline(num_inference_steps=2, output_type="np").images.shape == (1, 8, 8, 1)
    (logs,) = {path.parent for path in (folder / "logs").rglob("events*") if "drawing" in path.parent.name}
    events = EventAccumulator(str(logs)).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, STEPS + 1))
