"""Run a T5 that is split over two processes: the encoder on the first one, the decoder on the second; both get the output.

    accelerate launch --num_processes 2 t5.py
    accelerate launch --num_processes 2 t5.py --model t5-small
    accelerate launch t5.py

Every block of a decoder attends to the output of the encoder, so the blocks of both are no single chain that could be split
anywhere. `TwoStages` writes the model as a chain of two modules; the input of the second that is no output of the first one,
`decoder_input_ids`, reaches all stages. Without `--model` it is a tiny one with random weights. The last line is the largest
difference from the output of the unsplit model: below 1e-4. Needs transformers.
"""

import argparse

import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from accelerate import PartialState, prepare_pippy
from accelerate.utils import set_seed


class Encode(nn.Module):
    """The first stage: token ids, (batch, length), to what the decoder attends to, (batch, length, width)."""

    def __init__(self, model: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.encoder = model.encoder

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Run all blocks of the encoder."""
        return self.encoder(input_ids).last_hidden_state


class Decode(nn.Module):
    """The second stage: the encoder's output and the tokens so far to logits, (batch, length, vocabulary)."""

    def __init__(self, model: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.decoder, self.head = model.decoder, model.lm_head
        self.scale = model.config.d_model**-0.5 if model.config.scale_decoder_outputs else 1.0

    def forward(self, encoded: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        """Run all blocks of the decoder, and the head."""
        hidden = self.decoder(decoder_input_ids, encoder_hidden_states=encoded, use_cache=False).last_hidden_state
        return self.head(hidden * self.scale)


class TwoStages(nn.Module):
    """A T5 as a chain of two modules."""

    def __init__(self, model: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Encode(model), Decode(model)])

    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids to logits."""
        return self.stages[1](self.stages[0](input_ids), decoder_input_ids)


def main() -> None:
    """Split the model, run batches of two sizes, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of the Hub or a folder, in place of the tiny one")
    parser.add_argument("--batch_size", type=int, default=6)
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence")
    args = parser.parse_args()

    state = PartialState()
    if state.num_processes > 2:
        raise SystemExit("t5.py has two stages: launch it with --num_processes 2, or 1.")
    set_seed(0)  # equal weights on all processes, as loading them gives
    if args.model:
        t5 = T5ForConditionalGeneration.from_pretrained(args.model).eval()
    else:
        config = T5Config(vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=4, num_heads=4)
        t5 = T5ForConditionalGeneration(config).eval()
    input_ids = torch.randint(t5.config.vocab_size, (args.batch_size, args.length))
    inputs = {"input_ids": input_ids, "decoder_input_ids": input_ids[:, : args.length // 2]}
    with torch.no_grad():
        expected = t5(**inputs).logits  # only to compare with: here the model fits on one device

    model = prepare_pippy(TwoStages(t5), example_kwargs=inputs, gather_output=True)
    del t5
    stored = sum(parameter.numel() for parameter in model.parameters())
    print(f"process {state.process_index} holds {stored:,} parameters", flush=True)

    with torch.no_grad():
        whole = model(**inputs)
        small = model(**{name: value[:2] for name, value in inputs.items()})  # batches of any size
    differences = [(whole - expected).abs().max().item(), (small - expected[:2]).abs().max().item()]
    state.print(f"largest difference {max(differences):.1e}")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
