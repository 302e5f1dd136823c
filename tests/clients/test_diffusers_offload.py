"""The diffusers library's pipelines with models that take turns, or come layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

diffusers = pytest.importorskip("diffusers")

WORDS = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("default")  # the library has its own


SIZES = {"sample_size": 8, "block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pipeline of two tiny models that need no words."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        **SIZES,
    )
    decoder = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **SIZES
    )
    rest = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    pipeline = diffusers.StableDiffusionPipeline(
        decoder, unet=unet, scheduler=diffusers.DDIMScheduler(), requires_safety_checker=False, **rest
    )
    pipeline.save_pretrained(tmp_path / "pipeline")
    return tmp_path / "pipeline"


def draw(pipeline: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    images = pipeline(
        prompt_embeds=WORDS,
        negative_prompt_embeds=-WORDS,
        generator=generator,
        num_inference_steps=3,
        height=16,
        width=16,
        output_type="np",
    ).images
    return torch.from_numpy(images)


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["enable_sequential_cpu_offload", "enable_model_cpu_offload"])
def test_offloaded_pipelines_draw_the_same_picture(folder: Path, method: str) -> None:
    rest = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    plain = diffusers.StableDiffusionPipeline.from_pretrained(folder, **rest)
    offloaded = diffusers.StableDiffusionPipeline.from_pretrained(folder, **rest)
    plain.set_progress_bar_config(disable=True)
    offloaded.set_progress_bar_config(disable=True)
    getattr(offloaded, method)(device="cpu")
    for _ in range(2):
        assert torch.equal(draw(offloaded), draw(plain))
    hooked = [module for module in offloaded.unet.modules() if hasattr(module, "_hf_hook")]
    assert hooked
    offloaded.remove_all_hooks()
    assert not [module for module in offloaded.unet.modules() if hasattr(module, "_hf_hook")]


def test_a_model_is_loaded_in_parts(folder: Path, tmp_path: Path) -> None:
    plain = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet")
    names = [name for name, _ in plain.named_children()]
    places = {name: "disk" if index % 2 else "cpu" for index, name in enumerate(names)}
    spread = diffusers.UNet2DConditionModel.from_pretrained(
        folder / "unet", device_map=places, offload_folder=str(tmp_path / "offload")
    )
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for _ in range(3):  # convolutions round differently for weights at other addresses, whoever loaded them
            torch.testing.assert_close(spread(noise, 5, WORDS).sample, plain(noise, 5, WORDS).sample)


def test_layers_are_kept_in_a_smaller_dtype(folder: Path) -> None:
    model = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet")
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(noise, 5, WORDS).sample
        model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
        assert model.down_blocks[0].resnets[0].conv1.weight.dtype == torch.bfloat16
        torch.testing.assert_close(model(noise, 5, WORDS).sample, before, atol=0.05, rtol=0.05)
