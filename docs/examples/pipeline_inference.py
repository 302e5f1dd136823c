"""Run a model that is spread over processes, here a small one of transformers with random weights.

    accelerate launch --cpu --num_processes 2 docs/examples/pipeline_inference.py

Each rank keeps its own stage of the model; all ranks get the output.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate import PartialState, prepare_pippy
from accelerate.utils import set_seed


def main() -> None:
    state = PartialState()
    set_seed(0)  # equal weights on all processes, as loading them would give
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    input_ids = torch.randint(256, (6, 32))
    with torch.no_grad():
        expected = model(input_ids).logits  # only to compare with: here the model still fits

    model = prepare_pippy(model, example_args=(input_ids,), num_chunks=3, gather_output=True)
    own = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"process {state.process_index} holds {own:,} parameters; stages begin at {model.hf_split_points}", flush=True
    )
    for batch in (input_ids, input_ids[:2, :7]):  # any size, any length
        logits = model(batch).logits
        state.print(
            f"{tuple(batch.shape)}: differs by {(logits - expected[: len(batch), : batch.shape[1]]).abs().max():.1e}"
        )
    state.destroy_process_group()


if __name__ == "__main__":
    main()
