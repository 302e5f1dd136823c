"""T5 under Megatron-LM: the same losses and gradient norms as one process of plain PyTorch."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate.utils import MegatronLMPlugin
from tests.megatron.training import (
    TOKENS,
    assert_near,
    check_run,
    megatron_ranks,
    optimizer_of,
    run_with,
    start,
    train,
)

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")]

STEPS, BATCH = 5, 8
SIZES = {
    "vocab_size": TOKENS, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10, "decoder_start_token_id": 0,
}  # fmt: skip
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 2}
MT5 = {"kind": "MT5", "feed_forward_proj": "gated-gelu"}
TP2, DP2 = {"tp_degree": 2}, {"num_micro_batches": 2}


def new_t5(seed: int = 0, kind: str = "T5", **options: Any) -> Any:
    """A small model."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = getattr(transformers, f"{kind}Config")(**SIZES | options)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
        for parameter in model.parameters():  # as they are made, scores hardly depend on positions
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def t5_rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Pairs of sequences of other lengths than each other; each has another number of tokens and of labels."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(count):
        tokens = torch.randint(1, TOKENS, (13,), generator=generator)
        labels = torch.randint(1, TOKENS, (9,), generator=generator)
        mask = torch.ones_like(tokens)
        mask[5 + index % 8 :] = 0
        labels[3 + index % 6 :] = -100
        rows.append({"input_ids": tokens * mask, "attention_mask": mask, "labels": labels})
    return rows


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (TP2, {}),
    (DP2, GATED),
    (TP2 | {"num_micro_batches": 2}, GATED),
    (TP2, MT5),
    (TP2 | {"sequence_parallelism": True}, {}),
    (TP2 | {"recompute_activations": True, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, {}),
    (TP2 | {"recompute_activations": True, "recompute_granularity": "selective"}, GATED),
    (DP2 | {"use_distributed_optimizer": True}, {}),
]  # fmt: skip


@megatron_ranks(2)
def test_the_same_steps_as_in_one_process(rank: int, world: int) -> None:
    for layout, options in CASES:
        check_run(world, partial(new_t5, **options), layout, t5_rows(STEPS * BATCH), BATCH)


@megatron_ranks(2)
def test_weights_come_back_and_logits_are_those_of_the_model(rank: int, world: int) -> None:
    for layout, options in CASES[:5]:
        original, plain = new_t5(**options), new_t5(**options).eval()
        expected = {name: value.clone() for name, value in original.state_dict().items()}
        rows = t5_rows(7)
        with run_with(MegatronLMPlugin(return_logits=True, **layout)) as accelerator:
            model, _ = accelerator.prepare(original, DataLoader(rows, batch_size=7))  # type: ignore[arg-type]
            found = accelerator.get_state_dict(model)
            assert list(found) == list(expected)
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            model.eval()
            batch = next(iter(DataLoader(rows, batch_size=7)))  # type: ignore[arg-type]
            shifted = plain.prepare_decoder_input_ids_from_labels(batch["labels"])
            seen = (torch.arange(9) < 6).expand(7, -1).long()
            for one in (
                batch,
                {**batch, "decoder_input_ids": shifted.roll(1, 0), "decoder_attention_mask": seen},
                {"input_ids": batch["input_ids"], "decoder_input_ids": shifted[:, :4]},
            ):
                ours, theirs = model(**one), plain(**one)
                torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
                assert (ours.loss is None) is ("labels" not in one)
                if ours.loss is not None:
                    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
            with pytest.raises(ValueError, match="without 'labels' and without 'decoder_input_ids'"):
                model(input_ids=batch["input_ids"])


@megatron_ranks(2)
def test_a_run_goes_on_with_other_degrees(rank: int, world: int, tmp_path: Path) -> None:
    rows = t5_rows(4 * BATCH)
    with run_with(MegatronLMPlugin(num_micro_batches=2)) as accelerator:
        parts = start(accelerator, new_t5(**GATED), rows, 2)
        expected = train(accelerator, *parts)
    with run_with(MegatronLMPlugin(num_micro_batches=2)) as accelerator:
        parts = start(accelerator, new_t5(**GATED), rows[: 2 * BATCH], 2)
        assert train(accelerator, *parts) == expected[:2]
        accelerator.save_state(tmp_path / "state")
        accelerator.save_model(parts[0], tmp_path / "model")
        trained = accelerator.get_state_dict(parts[0])
    with run_with(MegatronLMPlugin(num_micro_batches=2, **TP2)) as accelerator:
        parts = start(accelerator, new_t5(seed=1, **GATED), rows[2 * BATCH :], 4)
        accelerator.load_state(tmp_path / "state")
        assert_near(train(accelerator, *parts), expected[2:])
    if rank == 0:
        from safetensors.torch import load_file

        written = load_file(tmp_path / "model" / "model.safetensors")
        assert all(torch.equal(value, trained[name]) for name, value in written.items())


@megatron_ranks(2)
def test_dropout_is_where_the_model_has_it(rank: int, world: int) -> None:
    """Also within the MLPs and after the last norms: in training the loss is another one each time, in evaluation not."""
    batch = next(iter(DataLoader(t5_rows(8), batch_size=8)))  # type: ignore[arg-type]
    within: list[float] = []
    after: list[float] = []
    for layout in (TP2, TP2 | {"sequence_parallelism": True}):
        with run_with(MegatronLMPlugin(**layout)) as accelerator:
            original = new_t5(dropout_rate=0.5)
            model, _ = accelerator.prepare(original, torch.optim.SGD(original.parameters(), lr=0.0))
            chunk = model.base_model
            for block in (chunk.encoder, chunk.decoder):
                block.layers[0].mlp.linear_fc2.register_forward_pre_hook(
                    lambda _, inputs: within.append(float((inputs[0] == 0).float().mean()))
                )
                block.final_layernorm.register_forward_hook(
                    lambda _, __, output: after.append(float((output == 0).float().mean()))
                )
            first, second = (float(model(**batch).loss) for _ in range(2))
            assert first != second
            assert min(within) > 0.6, "half of what relu left"
            assert 0.4 < min(after) < 0.6
            model.eval()
            assert float(model(**batch).loss) == float(model(**batch).loss)
        within.clear()
        after.clear()


@megatron_ranks(2)
def test_what_t5_cannot_do_is_refused(rank: int, world: int) -> None:
    for words, layout in (
        (r"pp_degree=2, but megatron-core has no pipeline stages for an encoder with a decoder", {"pp_degree": 2}),
        (r"custom_get_batch_function is for models that predict the next token", {"custom_get_batch_function": next}),
    ):
        with pytest.raises(ValueError, match=words), run_with(MegatronLMPlugin(**layout)) as accelerator:
            accelerator.prepare(new_t5())
    with run_with(MegatronLMPlugin()) as accelerator:
        original = new_t5()
        model, _ = accelerator.prepare(original, optimizer_of(original))
        batch = next(iter(DataLoader(t5_rows(2), 2)))  # type: ignore[arg-type]
        for words, wrong in (
            (r"labels has the shape \(3, 9\), and input_ids has \(2, 13\).*per sample", {"labels": torch.zeros(3, 9).long()}),
            (r"decoder_input_ids has the shape \(2, 8\), and labels has \(2, 9\).*per token", {"decoder_input_ids": torch.zeros(2, 8).long()}),
            (r"attention_mask has the shape \(2, 9\)", {"attention_mask": torch.ones(2, 9)}),
            (r"got 'token_type_ids'", {"token_type_ids": torch.zeros(2, 13).long()}),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=words):
                model(**{**batch, **wrong})
    with run_with(MegatronLMPlugin()) as accelerator:
        original = new_t5(decoder_start_token_id=None)
        model, _ = accelerator.prepare(original, optimizer_of(original))
        with pytest.raises(ValueError, match="decoder_start_token_id=None.*pass decoder_input_ids"):
            model(**batch)
        assert torch.isfinite(model(**batch, decoder_input_ids=batch["labels"].clamp(min=0)).loss)
