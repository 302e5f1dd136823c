"""Caption pictures on several processes: each gets a share of them, and the main process collects the captions in order.

    accelerate launch --num_processes 2 captions.py
    accelerate launch --num_processes 2 captions.py --model Salesforce/blip-image-captioning-base --data_dir images
    accelerate launch captions.py --model florence-community/Florence-2-base --prompt "<CAPTION>" --data_dir images

`split_between_processes` chooses the pictures of this process. Without `--model`, a tiny ViT with a GPT-2 as decoder is trained for
some seconds on squares of one colour, and names colour and side. The last line says which share of these captions is right: at
least 0.95. Needs transformers, and pillow for `--data_dir`, a folder of pictures.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, GPT2Config, VisionEncoderDecoderConfig, ViTConfig
from transformers import VisionEncoderDecoderModel as TinyModel

from accelerate import PartialState
from accelerate.utils import gather_object, set_seed

WORDS = ("<pad>", "<end>", "<start>", "red", "green", "blue", "left", "right")
CAPTIONS = [f"{color} {side}" for color, side in product(WORDS[3:6], WORDS[6:])]


def draw(caption: str) -> torch.Tensor:
    """A picture, (3, 16, 16): a square of the colour, at a random height of the side, on noise."""
    color, side = caption.split()
    picture = 0.2 * torch.rand(3, 16, 16)
    top, left = int(torch.randint(0, 9, ())), 8 * (side == "right")
    picture[WORDS.index(color) - 3, top : top + 8, left : left + 8] = 1.0
    return picture


def make_model(device: torch.device) -> Any:
    """A model from pictures to captions, trained on squares; the same on every process."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    encoder = ViTConfig(image_size=16, patch_size=4, **sizes)
    ends = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    decoder = GPT2Config(vocab_size=len(WORDS), n_positions=8, n_embd=32, n_layer=1, n_head=2, **ends)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, decoder, decoder_start_token_id=2, **ends
    )
    model = TinyModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        pictures = torch.stack([draw(caption) for caption in CAPTIONS * 4])
        labels = torch.tensor([[*map(WORDS.index, caption.split()), 1] for caption in CAPTIONS * 4])
        model(pixel_values=pictures.to(device), labels=labels.to(device)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def describe(args: argparse.Namespace, paths: list[Path], device: torch.device) -> Iterator[str]:
    """The captions of a real model."""
    from PIL import Image

    processor = AutoProcessor.from_pretrained(args.model)
    model = AutoModelForImageTextToText.from_pretrained(args.model).to(device).eval()
    words = {"text": args.prompt} if args.prompt else {}
    for path in paths:
        inputs = processor(images=Image.open(path).convert("RGB"), return_tensors="pt", **words).to(device)
        tokens = model.generate(**inputs, max_new_tokens=args.max_new_tokens)
        yield processor.batch_decode(tokens, skip_special_tokens=True)[0].strip()


def main() -> None:
    """Caption on all processes, and print on the main process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a captioning model of the Hub or a folder; needs --data_dir")
    parser.add_argument("--data_dir", help="a folder of pictures")
    parser.add_argument("--prompt", help="the task, for models that have several")
    parser.add_argument("--max_new_tokens", type=int, default=32)
    args = parser.parse_args()
    if bool(args.model) != bool(args.data_dir):
        parser.error("--model and --data_dir need each other: the tiny model knows only squares")

    state = PartialState()
    set_seed(0)
    if args.model:
        paths = sorted(path for path in Path(args.data_dir).iterdir() if path.suffix in (".jpg", ".jpeg", ".png"))
        names = [path.name for path in paths]
        with state.split_between_processes(paths) as share, torch.no_grad():
            written = list(describe(args, share, state.device))
    else:
        model = make_model(state.device)
        names = [CAPTIONS[number % len(CAPTIONS)] for number in range(21)]
        with state.split_between_processes([draw(name) for name in names]) as share, torch.no_grad():
            pictures = torch.stack(share).to(state.device)
            tokens = model.generate(pixel_values=pictures, max_new_tokens=4).tolist()
            written = [" ".join(WORDS[token] for token in row if token > 2) for row in tokens]
    print(f"process {state.process_index} has captioned {len(written)} pictures", flush=True)
    captions = gather_object(written)
    for name, caption in list(zip(names, captions, strict=True))[:3]:
        state.print(f"{name}: {caption!r}")
    if not args.model:
        right = [name == caption for name, caption in zip(names, captions, strict=True)]
        state.print(f"final accuracy {sum(right) / len(right):.3f} of {len(right)} captions")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
