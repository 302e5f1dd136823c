"""Run a Llama that is split over processes: each holds a stage of it, and all get the output.

    accelerate launch --num_processes 2 llama.py
    accelerate launch --num_processes 2 llama.py --model meta-llama/Llama-3.2-1B
    accelerate launch llama.py

For models that do not fit on one device. A batch is split into micro-batches, so that the second process works on the first
of them while the first process works on the second. Without `--model` it is a tiny one with random weights. The last
line is the largest difference from the output of the unsplit model: below 1e-4. Needs transformers.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate import PartialState, prepare_pippy
from accelerate.utils import set_seed


def main() -> None:
    """Split the model, run batches of several sizes, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of the Hub or a folder, in place of the tiny one")
    parser.add_argument("--batch_size", type=int, default=6)
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--num_chunks", type=int, help="micro-batches of a batch; default: as many as processes")
    args = parser.parse_args()

    state = PartialState()
    set_seed(0)  # equal weights on all processes, as loading them gives
    if args.model:
        model = LlamaForCausalLM.from_pretrained(args.model).eval()
    else:
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4
        )
        model = LlamaForCausalLM(config).eval()
    input_ids = torch.randint(model.config.vocab_size, (args.batch_size, args.length))
    inputs = {"input_ids": input_ids}
    with torch.no_grad():
        expected = model(**inputs).logits  # only to compare with: here the model fits on one device

    model = prepare_pippy(model, example_kwargs=inputs, num_chunks=args.num_chunks, gather_output=True)
    stored = sum(parameter.numel() for parameter in model.parameters())
    print(f"process {state.process_index} holds {stored:,} parameters", flush=True)

    with torch.no_grad():
        whole = model(**inputs).logits
        small = model(**{name: value[:2] for name, value in inputs.items()}).logits  # batches of any size
    differences = [(whole - expected).abs().max().item(), (small - expected[:2]).abs().max().item()]
    state.print(f"largest difference {max(differences):.1e}")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
