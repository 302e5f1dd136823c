"""Adapters of the peft library trained on a base model that processes share."""

from __future__ import annotations

import itertools
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
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(5):
        words = torch.randint(0, 64, (4, 8), generator=generator)
        part = words.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = model(input_ids=part, labels=part).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_([weight for weight in model.parameters() if weight.requires_grad], 1.0)
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


METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4, "target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}),
    "LoRA of tokens": ("LoraConfig", {"r": 4, "target_modules": ["v_proj"], "trainable_token_indices": [1, 2]}),
    "DoRA": ("LoraConfig", {"r": 4, "target_modules": ["q_proj"], "use_dora": True}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LoKr": ("LoKrConfig", {"r": 2, "target_modules": ["q_proj", "v_proj"]}),
    "VeRA": ("VeraConfig", {"r": 4, "target_modules": ["q_proj"]}),
    "OFT": ("OFTConfig", {"oft_block_size": 4, "target_modules": ["q_proj"]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
}
SHARDED: dict[str, dict[str, Any]] = {
    "FSDP 1": {
        "fsdp_plugin": {"fsdp_version": 1, "use_orig_params": True, "auto_wrap_policy": "transformer_based_wrap"}
    },
    "FSDP 2": {"fsdp_plugin": {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}},
    "ZeRO 3": {"deepspeed_plugin": {"zero_stage": 3, "gradient_clipping": 1e9}},
}


def adapted(method: str) -> tuple[Any, Any]:
    """A model with an adapter of which each value differs from what it would be without training, and its optimizer."""
    import peft

    from tests.clients import tiny

    kind, options = METHODS[method]
    base = tiny.llama(use_cache=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", **options))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        weight.data += 0.02 * torch.randn_like(weight)
    return model, torch.optim.SGD(trained, lr=0.3)


@pytest.mark.takes_turns
@pytest.mark.sample(3)
@ranks(2)
@pytest.mark.parametrize(
    ("method", "engine"),
    # under ZeRO 3 peft gathers the rows of trainable tokens on a GPU
    [cell for cell in itertools.product(METHODS, SHARDED) if cell != ("LoRA of tokens", "ZeRO 3")],
)
def test_a_sharded_adapter_is_saved_as_one_process_has_it(rank: int, method: str, engine: str, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")  # the libraries warn each other
    import peft

    from accelerate.utils import DeepSpeedPlugin
    from tests.clients import tiny

    rows = torch.randint(0, 64, (2, 4, 8), generator=torch.Generator().manual_seed(0))
    expected, sgd = adapted(method)
    for row in rows:
        expected(input_ids=row, labels=row).loss.backward()
        sgd.step()
        sgd.zero_grad()

    kinds = {"fsdp_plugin": FullyShardedDataParallelPlugin, "deepspeed_plugin": DeepSpeedPlugin}
    plugins = {name: kinds[name](**options) for name, options in SHARDED[engine].items()}
    accelerator = Accelerator(cpu=True, **plugins)
    if engine == "ZeRO 3":
        accelerator.deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True
        }  # fmt: skip
    model, optimizer = accelerator.prepare(*adapted(method))
    for row in rows:
        part = row.chunk(2)[rank]
        accelerator.backward(model(input_ids=part, labels=part).loss)
        optimizer.step()
        optimizer.zero_grad()
    state, inner = accelerator.get_state_dict(model), accelerator.unwrap_model(model)
    if accelerator.is_main_process:  # alone, as Trainer does
        inner.save_pretrained(tmp_path / "main", state_dict=state)
    inner.save_pretrained(
        tmp_path / "all", state_dict=state, is_main_process=rank == 0, save_function=accelerator.save
    )
    accelerator.wait_for_everyone()
    for folder in ("main", "all"):
        loaded = peft.PeftModel.from_pretrained(tiny.llama(use_cache=False), tmp_path / folder)
        want, got = (peft.get_peft_model_state_dict(model) for model in (expected, loaded))
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.allclose(got[name], tensor, atol=1e-5, rtol=1e-4), f"{folder}: {name}"


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
