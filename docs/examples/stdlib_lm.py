"""A tiny language model that is trained to write Python from Python's own standard library.

    accelerate launch --cpu --num_processes 2 docs/examples/stdlib_lm.py

A causal transformer over bytes; the text is the source of the standard library of the interpreter that runs this.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed, tqdm

# shapes: B batch, T positions, V = 256 byte values, D width


class StandardLibrary(Dataset):
    """Windows of `length + 1` bytes over the concatenated sources, each as (input, target) of `length` bytes."""

    def __init__(self, length: int, limit: int) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:limit]
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.length = length

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        window = self.bytes[start : start + self.length + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.feed(self.norm2(x))


class LanguageModel(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, length: int, width: int = 128, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.length = length
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, x: Tensor) -> Tensor:  # (B, T) of bytes -> (B, T, V) of logits
        return self.head(self.blocks(self.byte(x) + self.position.weight[: x.shape[1]]))

    @torch.no_grad()
    def write(self, prompt: str, count: int, device: torch.device) -> str:
        """Go on from `prompt` for `count` bytes."""
        text = torch.tensor([list(prompt.encode())], device=device)
        for _ in range(count):
            logits = self(text[:, -self.length :])[0, -1].float()
            text = torch.cat([text, torch.multinomial((logits / 0.6).softmax(-1), 1)[None]], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=16, help="over all processes together")
    parser.add_argument("--length", type=int, default=128, help="bytes a sample")
    parser.add_argument("--text_bytes", type=int, default=2_000_000, help="how much of the library to read")
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    args = parser.parse_args()

    accelerator = Accelerator(
        mixed_precision=args.mixed_precision, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    set_seed(0)
    loader = DataLoader(
        StandardLibrary(args.length, args.text_bytes), batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    model = LanguageModel(args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    bar = tqdm(total=args.steps)
    step, recent = 0, []
    while step < args.steps:
        for inputs, targets in loader:
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recent.append(loss.detach())
            step += 1
            bar.update()
            if step % 50 == 0:
                mean = accelerator.reduce(torch.stack(recent).mean(), reduction="mean").item()
                accelerator.print(f"step {step:4}: {mean / math.log(2):.2f} bits a byte")
                recent.clear()
            if step == args.steps:
                break
    bar.close()
    if accelerator.is_main_process:
        writer = accelerator.unwrap_model(model).eval()
        for prompt in ("def ", "import ", "class "):
            print("-" * 60)
            print(writer.write(prompt, 200, accelerator.device))
    accelerator.end_training()


if __name__ == "__main__":
    main()
