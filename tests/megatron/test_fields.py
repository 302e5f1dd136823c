"""No field of the plugin is left out without a word."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_integrations.megatron.families.table import shape_of
from accel_integrations.megatron.fields import UNSUPPORTED, WITHOUT_EFFECT, check_fields, check_model_arguments
from accel_integrations.megatron.placeholders import MegatronLMDummyScheduler
from accel_integrations.megatron.prepared import make_scheduler
from accel_state.settings.megatron import MegatronLMPlugin
from tests.megatron.test_t5 import new_t5
from tests.megatron.training import new_model

OF_ANOTHER_KIND = {
    "weight_decay_incr_style": "cosine", "consumed_samples": [8], "tensorboard_dir": "runs", "start_weight_decay": 0.1,
    "end_weight_decay": 0.1, "lr_decay_samples": 9, "pipeline_model_parallel_split_rank": 1,
    "no_wd_decay_cond": len, "scale_lr_cond": len,
}  # fmt: skip


def test_what_would_train_otherwise_is_refused() -> None:
    check_fields(MegatronLMPlugin())
    for name, (reason, instead) in UNSUPPORTED.items():
        plugin = MegatronLMPlugin()
        setattr(plugin, name, OF_ANOTHER_KIND.get(name, True))
        with pytest.raises(NotImplementedError, match=f"{name}=") as raised:
            check_fields(plugin)
        assert str(raised.value).endswith(f"is not supported. {reason}. {instead}")


def test_the_table_in_the_documentation_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (refused|warning) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    documented = {
        name: (kind, reason.replace("`", ""), instead.replace("`", "")) for name, kind, reason, instead in rows
    }
    expected = {
        name: (kind, reason, instead.rstrip("."))
        for kind, table in (("refused", UNSUPPORTED), ("warning", WITHOUT_EFFECT))
        for name, (reason, instead) in table.items()
    }
    assert documented == expected


def test_arguments_of_megatron_lm_that_a_model_decides() -> None:
    pytest.importorskip("transformers")
    rope, learned, relative = (
        shape_of(model) for model in (new_model(num_key_value_heads=1), new_model("GPT2"), new_t5())
    )
    for shape, others in (
        (rope, {"position_embedding_type": "rope", "attention_head_type": "multiquery"}),
        (learned, {"position_embedding_type": "learned", "attention_head_type": "multihead"}),
        (rope, {"position_embedding_type": "rotary"}),
        (learned, {"position_embedding_type": "learned_absolute"}),
        (learned, {"position_embedding_type": "absolute"}),
        (relative, {"position_embedding_type": "relative"}),
    ):
        check_fields(MegatronLMPlugin(other_megatron_args=others))
        check_model_arguments(others, shape)
    for shape, others, words in (
        (
            learned,
            {"position_embedding_type": "rope"},
            "='rope', but the model that is prepared has 'learned_absolute'",
        ),
        (
            learned,
            {"attention_head_type": "multiquery"},
            "one head of keys and values, but .* has 4.*num_key_value_heads=1",
        ),
        (rope, {"attention_head_type": "multihead"}, "='multihead', but .* has 1 heads of keys and values for 4"),
    ):
        with pytest.raises(ValueError, match=words):
            check_model_arguments(others, shape)
    with pytest.raises(
        NotImplementedError, match=r"position_embedding_type='alibi'.*has no attention with ALiBi's bias"
    ):
        check_fields(MegatronLMPlugin(other_megatron_args={"position_embedding_type": "alibi"}))
    with pytest.raises(ValueError, match=r"attention_head_type='many'. Choose one of 'multihead', 'multiquery'"):
        check_fields(MegatronLMPlugin(other_megatron_args={"attention_head_type": "many"}))


def test_tokenizers_are_for_functions_of_the_program() -> None:
    others = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "vocab.json", "merge_file": "merges.txt"}
    with pytest.warns(UserWarning, match="tokenizer_type, vocab_file, merge_file in .* have no effect") as caught:
        check_fields(MegatronLMPlugin(other_megatron_args=others))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_fields(MegatronLMPlugin(other_megatron_args=others, custom_train_step_class=object))


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_trains_the_same_is_only_warned_about(name: str) -> None:
    plugin = MegatronLMPlugin()
    setattr(plugin, name, OF_ANOTHER_KIND.get(name, True))
    with pytest.warns(UserWarning, match=f"{name}=.* has no effect"):
        check_fields(plugin)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_fields(plugin, warn=False)


def rates(warmup_num_steps: int = 0, **fields: Any) -> list[float]:
    """The learning rates of eleven steps of one process."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    plugin = MegatronLMPlugin(**fields)
    plugin.set_training_args(micro_batch_size=1, dp_degree=1)
    dummy = MegatronLMDummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=warmup_num_steps)
    scheduler = make_scheduler(dummy, optimizer, plugin, count=1)
    found = []
    for _ in range(11):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def test_the_warmup_can_be_a_fraction_of_the_decay() -> None:
    assert rates(lr_warmup_fraction=0.4) == pytest.approx(rates(warmup_num_steps=4))
    quarter = rates(lr_warmup_fraction=0.25)
    assert quarter[:3] == pytest.approx([0.0, 1 / 2.5, 2 / 2.5])
    assert quarter[3:5] == pytest.approx([1 - 0.5 / 7.5, 1 - 1.5 / 7.5])
    assert rates(lr_warmup_fraction=0.0) == pytest.approx(rates())
    with pytest.raises(ValueError, match="lr_warmup_fraction=0.25 and 4 warmup steps cannot be combined"):
        rates(warmup_num_steps=4, lr_warmup_fraction=0.25)
