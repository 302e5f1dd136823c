"""Adapters of the peft library trained on a base model that processes share."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from tests.support.ranks import ranks

pytest.importorskip("peft")
pytest.importorskip("transformers")


def train(plugin: Any = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of a few steps, and the adapter afterwards."""
    warnings.simplefilter("ignore")  # the libraries warn each other
    import peft
    import transformers

    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, max_position_embeddings=32, **sizes)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(transformers.LlamaForCausalLM(config), settings)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(5):
        words = torch.randint(0, 64, (4, 8), generator=generator)
        part = words.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = model(input_ids=part, labels=part).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_([one for one in model.parameters() if one.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    state = accelerator.get_state_dict(model)
    return losses, {name: tensor for name, tensor in state.items() if "lora_" in name}


def start_over() -> None:
    """Forget how the run before was set up, but not the processes."""
    AcceleratorState._reset_state()
    GradientState._reset_state()


@pytest.mark.takes_turns
@ranks(2)
def test_adapters_learn_alike_however_the_base_is_shared(rank: int, world: int, tmp_path: Path) -> None:
    expected, adapter = train()
    for version in (1, 2):
        start_over()
        settings = {"fsdp_version": version, "auto_wrap_policy": "transformer_based_wrap"}
        if version == 1:
            with pytest.raises(ValueError, match=r"frozen and trainable parameters.*use_orig_params=True"):
                train(FullyShardedDataParallelPlugin(**settings))
            start_over()
            settings["use_orig_params"] = True
        losses, shared = train(FullyShardedDataParallelPlugin(**settings))
        assert losses == pytest.approx(expected, abs=1e-5)
        if rank == 0:
            assert len(adapter) == 8
            assert shared.keys() == adapter.keys()
            for name, tensor in shared.items():
                torch.testing.assert_close(tensor.cpu(), adapter[name], atol=1e-5, rtol=1e-4)


@pytest.mark.takes_turns
@pytest.mark.filterwarnings("default")  # the libraries have their own
def test_trainer_trains_an_adapter_and_goes_on(tmp_path: Path) -> None:
    import peft

    from tests.clients import tiny
    from tests.clients.trainer import history, make_trainer

    def adapted() -> Any:
        settings = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(1)
        return peft.get_peft_model(tiny.llama(), settings)

    common = {"model": adapted, "max_steps": 8, "save_steps": 4, "learning_rate": 5e-2}
    whole = make_trainer(tmp_path, **common)
    whole.train()
    names = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    resumed = make_trainer(tmp_path, **common)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert history(resumed, "loss") == history(whole, "loss")
    expected = peft.get_peft_model_state_dict(whole.model)
    found = peft.get_peft_model_state_dict(resumed.model)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert history(whole, "loss")[-1] < history(whole, "loss")[0]
