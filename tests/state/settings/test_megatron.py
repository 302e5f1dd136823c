"""The Megatron-LM plugin and its model parsers."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from accel_state.enums import DistributedType
from accel_state.errors import MissingLibraryError
from accel_state.settings.megatron import MegatronLMPlugin
from accel_state.settings.megatron_models import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS,
    add_model_config_to_megatron_parser,
    parse_bert_config,
)

BERT = {"num_hidden_layers": 3, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 16}
GPT2 = {"n_layer": 3, "n_embd": 8, "n_head": 2, "n_positions": 16}
T5 = {"num_layers": 3, "d_model": 8, "num_heads": 2, "n_positions": 16}
GLM = BERT | {
    "head_dim": 4,
    "use_qk_norm": True,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "n_routed_experts": 6,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "bf16": True,
}


def model(model_type: str, class_name: str = "Model", **config: Any) -> Any:
    values = {"model_type": model_type, "vocab_size": 100, "return_dict": True, "num_labels": 2, **config}
    made = type(class_name, (), {})()
    made.config = SimpleNamespace(**values)
    return made


def sizes(made: Any, batch: Any = None, **given: Any) -> tuple[MegatronLMPlugin, dict[str, Any]]:
    plugin = MegatronLMPlugin(**given)
    before = dict(plugin.megatron_lm_default_args)
    plugin.set_network_size_args(made, batch)
    arguments = plugin.megatron_lm_default_args
    return plugin, {name: value for name, value in arguments.items() if name not in before}


def test_fields_become_arguments_under_megatron_names() -> None:
    plugin = MegatronLMPlugin(tp_degree=2, gradient_clipping=0.5, other_megatron_args={"clip_grad": 0.1, "new": 1})
    arguments = plugin.megatron_lm_default_args
    assert arguments["tensor_model_parallel_size"] == 2
    assert (arguments["clip_grad"], arguments["new"]) == (0.1, 1)
    assert arguments["DDP_impl"] == plugin.DDP_impl == "torch"
    assert MegatronLMPlugin(pp_degree=2).DDP_impl == "local"
    assert MegatronLMPlugin(use_distributed_optimizer=True).megatron_lm_default_args["DDP_impl"] == "local"
    assert MegatronLMPlugin(consumed_samples=[7]).consumed_samples == [7, 0, 0]
    assert (plugin.distributed_type, plugin.main_process) == (DistributedType.MEGATRON_LM, "last")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp_degree": 0}, "MegatronLMPlugin.tp_degree=0"),
        ({"recompute_granularity": "some"}, "'some' .* 'full', 'selective'"),
        ({"hidden_dropout": 1.5}, "hidden_dropout=1.5 .* from 0 to 1"),
        ({"consumed_samples": [1, 2, 3, 4]}, "consumed_samples"),
        ({"custom_loss_function": 3}, "custom_loss_function=3"),
    ],
)
def test_wrong_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronLMPlugin(**given)


def test_number_formats() -> None:
    half, brain, full = (MegatronLMPlugin() for _ in range(3))
    for plugin, precision in ((half, "fp16"), (brain, "bf16"), (full, "no")):
        plugin.attach(SimpleNamespace(mixed_precision=precision))  # type: ignore[arg-type]
    assert half.megatron_lm_default_args["fp16"]
    assert brain.megatron_lm_default_args["bf16"]
    assert brain.DDP_impl == "local"
    assert not {"fp16", "bf16"} & set(full.megatron_lm_default_args)


def test_batch_sizes_and_a_schedule_in_samples_that_is_pointed_out() -> None:
    plugin = MegatronLMPlugin(num_micro_batches=3, train_samples=70, lr_warmup_iters=1)
    plugin.set_training_args(4, 2)
    assert (plugin.micro_batch_size, plugin.data_parallel_size, plugin.global_batch_size) == (4, 2, 24)
    assert plugin.megatron_lm_default_args["global_batch_size"] == 24
    with pytest.warns(UserWarning, match="train_samples=70 has no effect, .* Set train_iters"):
        plugin.set_scheduler_args(SimpleNamespace(total_num_steps=10))
    assert plugin.train_samples is None


def test_optimizers() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1))]
    plugin = MegatronLMPlugin()
    plugin.set_optimizer_type(torch.optim.AdamW(parameters, lr=0.2, weight_decay=0.1))
    wanted = {"optimizer": "adam", "adam_beta1": 0.9, "adam_eps": 1e-8, "lr": 0.2, "weight_decay": 0.1}
    assert wanted.items() <= plugin.megatron_lm_default_args.items()
    plugin.set_optimizer_type(torch.optim.SGD(parameters, lr=0.1, momentum=0.3))
    assert {"optimizer": "sgd", "sgd_momentum": 0.3, "lr": 0.1}.items() <= plugin.megatron_lm_default_args.items()
    with pytest.raises(ValueError, match="does not support the optimizer 'RMSprop'"):
        plugin.set_optimizer_type(torch.optim.RMSprop(parameters))


def test_the_schedule_comes_from_the_scheduler_unless_it_is_set() -> None:
    scheduler = SimpleNamespace(total_num_steps=10, warmup_num_steps=4)
    plugin = MegatronLMPlugin(lr_decay_style="cosine")
    plugin.set_training_args(4, 2)
    plugin.set_scheduler_args(scheduler)
    wanted = {"train_iters": 5, "lr_warmup_iters": 2, "lr_warmup_samples": 0, "lr_decay_style": "cosine", "min_lr": 0}
    assert wanted.items() <= plugin.megatron_lm_default_args.items()
    plugin = MegatronLMPlugin(train_iters=9, lr_warmup_iters=1)
    plugin.set_scheduler_args(scheduler)
    assert (plugin.train_iters, plugin.lr_warmup_iters) == (9, 1)


def test_a_schedule_of_unknown_length_is_refused() -> None:
    plugin = MegatronLMPlugin()
    with pytest.raises(ValueError, match="train_iters cannot be derived, because the data-parallel size is not known"):
        plugin.set_scheduler_args(SimpleNamespace(total_num_steps=10))
    plugin.set_training_args(4, 2)
    with pytest.raises(ValueError, match="SimpleNamespace.total_num_steps is not known"):
        plugin.set_scheduler_args(SimpleNamespace())


@pytest.mark.parametrize(
    ("made", "kind", "more"),
    [
        (model("megatron-bert", "BertForMaskedLM", **BERT), "bert", {"pretraining_flag": True, "num_labels": 2}),
        (model("megatron-bert", **BERT), "bert", {"pretraining_flag": False}),
        (model("gpt2", **GPT2), "gpt", {"tokenizer_type": "GPT2BPETokenizer", "return_logits": False}),
        (model("mt5", **T5), "t5", {"encoder_seq_length": 16, "decoder_seq_length": 16}),
        (model("llama", **BERT), "gpt", {"tokenizer_type": "Llama2Tokenizer", "seq_length": 16}),
        (
            model("glm4_moe", **GLM),
            "gpt",
            {
                "moe_layer_freq": [0, 1, 1],
                "moe_shared_expert_intermediate_size": 24,
                "rotary_base": 10000.0,
                "untie_embeddings_and_output_weights": True,
                "bf16": True,
            },
        ),
        (
            model("glm4_moe", **GLM, fp8_param=True, fp8="hybrid"),
            "gpt",
            {"fp8": "hybrid", "fp8_recipe": None},
        ),
    ],
)
def test_sizes_of_each_family(made: Any, kind: str, more: dict[str, Any]) -> None:
    _, arguments = sizes(made)
    common = {"num_layers": 3, "hidden_size": 8, "num_attention_heads": 2, "orig_vocab_size": 100}
    wanted = {"model_type_name": kind, "max_position_embeddings": 16, "model_return_dict": True, **common, **more}
    assert wanted.items() <= arguments.items()
    assert ("fp8" in arguments) == ("fp8" in more)


def test_sequence_lengths_come_from_the_user_then_the_batch_then_the_model() -> None:
    batch = {"input_ids": torch.zeros(2, 7), "labels": torch.zeros(2, 5)}
    gpt, bert, llama = model("gpt2", **GPT2), model("megatron-bert", **BERT), model("llama", **BERT)
    assert sizes(gpt)[0].seq_length == 16
    assert sizes(gpt, batch)[0].seq_length == 7
    assert sizes(gpt, batch, decoder_seq_length=9)[0].seq_length == 9
    assert sizes(gpt, batch, seq_length=3)[0].seq_length == 3
    assert sizes(bert, batch, encoder_seq_length=9)[0].seq_length == 9
    assert sizes(llama, batch)[0].seq_length == 7
    assert sizes(model("llama", **BERT, max_sequence_length=12), batch)[0].seq_length == 12
    plugin = sizes(model("t5", **T5), batch)[0]
    assert (plugin.encoder_seq_length, plugin.decoder_seq_length) == (7, 5)


def test_models_without_parser_or_size_are_refused() -> None:
    with pytest.raises(ValueError, match="type 'opt' have no Megatron-LM parser"):
        MegatronLMPlugin().set_network_size_args(model("opt"))
    with pytest.raises(ValueError, match="does not set 'n_layer'"):
        MegatronLMPlugin().set_network_size_args(model("gpt2"))


def test_a_parser_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "accel_state.settings.megatron_models.MODEL_CONFIGS_TO_MEGATRON_PARSERS",
        dict(MODEL_CONFIGS_TO_MEGATRON_PARSERS),
    )

    @add_model_config_to_megatron_parser("mine")
    def parse_mine(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> None:
        """Mine."""
        megatron_lm_plugin.megatron_lm_default_args["num_layers"] = model.config.depth

    assert sizes(model("mine-2", depth=4))[1] == {"num_layers": 4}
    assert parse_mine.__name__ == "parse_mine"
    assert MODEL_CONFIGS_TO_MEGATRON_PARSERS["megatron-bert"] is parse_bert_config


def test_logging_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)  # as if it were not installed
    with pytest.raises(MissingLibraryError, match="megatron-lm"):
        MegatronLMPlugin(tensorboard_dir="logs", set_all_logging_options=True)
    arguments = ModuleType("megatron.training.arguments")

    def add(parser: ArgumentParser) -> ArgumentParser:
        parser.add_argument("--log-memory", action="store_true")
        parser.add_argument("--log-interval", type=int, default=100)
        return parser

    arguments._add_logging_args = add  # type: ignore[attr-defined]
    for name in ("megatron", "megatron.training"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.training.arguments", arguments)
    plugin = MegatronLMPlugin(tensorboard_dir="logs", set_all_logging_options=True)
    assert plugin.megatron_lm_default_args["tensorboard_dir"] == "logs"
    assert plugin.megatron_lm_default_args["log_memory"] is True
    assert "log_interval" not in plugin.megatron_lm_default_args
