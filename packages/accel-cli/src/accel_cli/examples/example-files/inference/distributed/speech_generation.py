"""Speak texts on several processes: each gets a share of the texts, and writes what it has spoken.

    accelerate launch --num_processes 2 speech_generation.py --output_dir spoken
    accelerate launch --num_processes 2 speech_generation.py --model facebook/mms-tts-eng --texts "good morning" "good night"

`split_between_processes` chooses the texts of this process. Each text has a seed of its own, so its recording does not depend on the
number of processes. Without `--model`, an untrained VITS makes noise of the letters; `--texts_file` has a text in each line. The last
line is the number of recordings. Needs transformers.
"""

import argparse
import wave
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer, VitsConfig, VitsModel

from accelerate import PartialState
from accelerate.utils import gather_object, set_seed


def make_speaker(name: str | None, device: torch.device) -> tuple[Callable[[str, int], torch.Tensor], int]:
    """A function of a text and a seed that returns a recording, (values,), from -1 to 1, and its values in a second."""
    set_seed(0)  # equal weights on all processes, as loading them gives
    if name:
        tokenizer, model = AutoTokenizer.from_pretrained(name), VitsModel.from_pretrained(name)
    else:
        sizes = {
            "hidden_size": 16,
            "flow_size": 16,
            "ffn_dim": 16,
            "spectrogram_bins": 9,
            "upsample_initial_channel": 16,
        }
        layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "prior_encoder_num_flows": 1}
        upsampling = {"upsample_rates": [8, 8], "upsample_kernel_sizes": [16, 16]}
        model = VitsModel(VitsConfig(vocab_size=128, **sizes, **layers, **upsampling))
    model = model.to(device).eval()

    def speak(text: str, seed: int) -> torch.Tensor:
        set_seed(seed)
        if name:
            inputs = dict(tokenizer(text, return_tensors="pt").to(device))
        else:
            inputs = {"input_ids": torch.tensor([[ord(letter) % 128 for letter in text]], device=device)}
        with torch.no_grad():
            return model(**inputs).waveform[0].float().cpu()

    return speak, model.config.sampling_rate


def write(recording: torch.Tensor, rate: int, path: Path) -> None:
    """Write a recording as a .wav file, as loud as 16 bits can have it."""
    values = recording / recording.abs().max().clamp(min=1e-9) * 32_767
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", "not compressed"))
        file.writeframes(values.to(torch.int16).numpy().tobytes())


def main() -> None:
    """Speak on all processes, and print on the main process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a VITS of the Hub or a folder")
    parser.add_argument("--texts", nargs="+", default=["good morning", "good night", "a red house", "one", "two"])
    parser.add_argument("--texts_file", help="a file with a text in each line, in place of --texts")
    parser.add_argument("--output_dir", help="folder for the .wav files")
    args = parser.parse_args()
    texts = Path(args.texts_file).read_text(encoding="utf-8").splitlines() if args.texts_file else args.texts

    state = PartialState()
    speak, rate = make_speaker(args.model, state.device)
    spoken = []
    with state.split_between_processes(list(enumerate(texts))) as share:
        for number, text in share:
            recording = speak(text, number)
            spoken.append((number, len(recording) / rate, float(recording.abs().mean())))
            if args.output_dir:
                Path(args.output_dir).mkdir(parents=True, exist_ok=True)
                write(recording, rate, Path(args.output_dir) / f"{number}.wav")
    print(f"process {state.process_index} has spoken {len(share)} texts", flush=True)
    collected = gather_object(spoken)
    for number, seconds, loudness in collected:
        state.print(f"{number}, {texts[number]!r}: {seconds:.2f} s, mean loudness {loudness:.4f}")
    state.print(f"{len(collected)} recordings")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
