"""Generate images with a diffusion pipeline on several processes: each gets a share of the prompts.

    accelerate launch --num_processes 2 image.py --output_dir images
    accelerate launch --num_processes 2 image.py --model stabilityai/sd-turbo --prompts "a red house" "a blue house"

`split_between_processes` chooses the prompts of this process. Each image has a seed of its own, so it does not depend on the
number of processes. Without `--model`, an untrained diffusion model draws noise from the numbers of the images; a real one is
a text-to-image pipeline of diffusers. The last line is the number of images. Needs diffusers.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DDIMPipeline, DDIMScheduler, DiffusionPipeline, UNet2DModel

from accelerate import PartialState
from accelerate.utils import gather_object, set_seed


def make_drawing(args: argparse.Namespace, device: torch.device) -> Callable[[str, int], Any]:
    """A function of a prompt and a seed that draws an image, with values from 0 to 1, (height, width, 3)."""
    set_seed(0)  # equal weights on all processes, as loading them gives
    if args.model:
        pipeline = DiffusionPipeline.from_pretrained(args.model).to(device)
    else:
        sizes = {"block_out_channels": (16, 16), "layers_per_block": 1, "norm_num_groups": 4}
        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        unet = UNet2DModel(sample_size=16, **sizes, **blocks)
        pipeline = DDIMPipeline(unet=unet, scheduler=DDIMScheduler()).to(device)
    pipeline.set_progress_bar_config(disable=True)

    def draw(prompt: str, seed: int) -> Any:
        words = {"prompt": prompt} if args.model else {}  # the untrained one knows no words
        generator = torch.Generator().manual_seed(seed)
        drawn = pipeline(**words, num_inference_steps=args.steps, generator=generator, output_type="np")
        return drawn.images[0]

    return draw


def main() -> None:
    """Draw on all processes, and print on the main process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a text-to-image pipeline of the Hub or a folder")
    parser.add_argument(
        "--prompts", nargs="+", default=["a red house", "a blue house", "a bridge", "a boat", "a tree"]
    )
    parser.add_argument("--steps", type=int, default=4, help="denoising steps")
    parser.add_argument("--output_dir", help="folder for the images, as .npy files")
    args = parser.parse_args()

    state = PartialState()
    draw = make_drawing(args, state.device)
    means = []
    with state.split_between_processes(list(enumerate(args.prompts))) as share:
        for number, prompt in share:
            image = draw(prompt, number)
            means.append((number, float(image.mean())))
            if args.output_dir:
                Path(args.output_dir).mkdir(parents=True, exist_ok=True)
                np.save(Path(args.output_dir) / f"{number}.npy", image)
    print(f"process {state.process_index} has drawn {len(share)} images", flush=True)
    collected = gather_object(means)
    for number, mean in collected:
        state.print(f"image {number}, {args.prompts[number]!r}: mean {mean:.3f}")
    state.print(f"{len(collected)} images")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
