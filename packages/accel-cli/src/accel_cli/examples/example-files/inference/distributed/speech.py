"""Transcribe speech on several processes: each gets a share of the recordings, whatever their number.

    accelerate launch --num_processes 2 speech.py
    accelerate launch --num_processes 2 speech.py --model openai/whisper-tiny --data recordings.npz

`split_between_processes` chooses the recordings of this process, and `gather_object` collects the texts in order. Without
`--model`, "speech" is tones, one for each letter, and a tiny CTC model is trained on them for some seconds. The last line says
which share of the letters is right: at least 0.95. `--data` is a file of numpy's `savez` with one array for each recording,
16,000 values in a second, from -1 to 1. A real model needs transformers.
"""

import argparse
from typing import Any

import numpy as np
import torch
from torch import nn

from accelerate import PartialState
from accelerate.utils import gather_object, set_seed

LETTERS = "-abcdef"  # the first one is CTC's blank
FRAME = 160  # values, a hundredth of a second


def speak(text: str, draw: np.random.Generator) -> np.ndarray:
    """A recording, (values,): 30 ms of a tone for each letter, a pause behind it, and noise."""
    times = np.arange(3 * FRAME) / 16_000
    tones = [np.sin(2 * np.pi * 400 * LETTERS.index(letter) * times) for letter in text]
    sound = np.concatenate([np.concatenate([tone, np.zeros(FRAME)]) for tone in tones])
    return (sound + 0.1 * draw.standard_normal(len(sound))).astype(np.float32)


def hear(model: nn.Module, recording: np.ndarray) -> torch.Tensor:
    """Log-probabilities of the letters, (frames, letters), from the spectrum of each frame."""
    frames = torch.tensor(recording).to(next(model.parameters()).device).unfold(0, FRAME, FRAME)
    return model(torch.fft.rfft(frames).abs().log1p()).log_softmax(dim=-1)


def make_model(draw: np.random.Generator, device: torch.device) -> nn.Module:
    """A classifier of frames, trained with the CTC loss; the same on every process."""
    model = nn.Sequential(nn.Linear(FRAME // 2 + 1, 64), nn.ReLU(), nn.Linear(64, len(LETTERS))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        text = "".join(draw.choice(list(LETTERS[1:]), 8))
        target = torch.tensor([LETTERS.index(letter) for letter in text])
        heard = hear(model, speak(text, draw))
        nn.functional.ctc_loss(heard, target, [len(heard)], [len(target)]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def transcribe(model: nn.Module, recording: np.ndarray) -> str:
    """The likeliest letter of each frame, without repetitions and blanks."""
    best = torch.unique_consecutive(hear(model, recording).argmax(dim=-1)).tolist()
    return "".join(LETTERS[number] for number in best if number)


def main() -> None:
    """Transcribe on all processes, and print on the main process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a speech recognition model of the Hub or a folder; needs --data")
    parser.add_argument("--data", help="an .npz file with one array for each recording")
    args = parser.parse_args()
    if bool(args.model) != bool(args.data):
        parser.error("--model and --data need each other: the tiny model knows only tones")

    state = PartialState()
    set_seed(0)
    draw = np.random.default_rng(0)  # the same recordings on every process
    if args.model:
        from transformers import pipeline

        recognizer = pipeline("automatic-speech-recognition", args.model, device=state.device)
        recordings: Any = list(np.load(args.data).values())
        texts: list[str] = []
    else:
        model = make_model(draw, state.device)
        texts = ["".join(draw.choice(list(LETTERS[1:]), draw.integers(3, 9))) for _ in range(21)]
        recordings = [speak(text, draw) for text in texts]
    with state.split_between_processes(recordings) as share, torch.no_grad():
        heard = [recognizer(one)["text"] if args.model else transcribe(model, one) for one in share]
    print(f"process {state.process_index} has transcribed {len(heard)} recordings", flush=True)
    collected = gather_object(heard)
    if args.model:
        state.print("\n".join(collected))
    else:
        pairs = [pair for said, understood in zip(texts, collected, strict=True) for pair in zip(said, understood)]  # noqa: B905
        right = sum(a == b for a, b in pairs) / sum(map(len, texts))
        state.print(f"the first: {texts[0]!r} was understood as {collected[0]!r}")
        state.print(f"final accuracy {right:.3f} of {sum(map(len, texts))} letters")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
