"""What a user sees of training in stages: parts, optimizers, outputs, checkpoints and mistakes."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_integrations.engines.pipelined import PipelinedEngine
from accel_ops.modules import to_local
from accel_state.mesh import ParallelismConfig
from accel_state.settings.accumulation import GradientAccumulationPlugin
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accel_state.settings.parallelism import PipelineParallelConfig
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from tests.support.ranks import ranks
from tests.support.tiny_transformer import VOCABULARY, batches, make_loader, make_model, shift, token_loss

ADAMW = partial(torch.optim.AdamW, lr=3e-3, eps=1e-4)  # does not blow gradients up that are zero but for rounding
IDS = torch.arange(8 * 16).view(8, 16) % VOCABULARY


def pipelined(schedule: str = "gpipe", copies: int = 1, stages: int = 2, **settings: Any) -> Accelerator:
    accumulation = settings.pop("accumulation", None)
    handler = PipelineParallelConfig(schedule, **settings)  # type: ignore[arg-type]
    config = ParallelismConfig(pp_size=stages, dp_replicate_size=copies, pp_handler=handler)
    return Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_plugin=accumulation)


def sharded() -> Accelerator:
    return Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(pp_size=2, dp_shard_size=2),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
    )


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of parameters, as training scripts make them."""
    named = list(model.named_parameters())
    return [
        {"params": [one for _, one in named if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for _, one in named if one.ndim <= 1], "weight_decay": 0.0, "lr": 1e-3},
    ]


def train(model: Any, optimizer: Any, backward: Any, loader: Any, steps: int) -> list[float]:
    losses = []
    for batch in batches(loader, steps):
        loss = token_loss(model(batch["input_ids"]), shift(batch["labels"]))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def close(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


def close_gradients(accelerator: Accelerator, model: Any, full: nn.Module, without: tuple[str, ...] = ()) -> None:
    """Check the gradients of the stages of this rank against those of a model in one process."""
    for name, parameter in accelerator.unwrap_model(model).named_parameters():
        if name not in without:
            expected = full.get_parameter(name).grad
            assert (parameter.grad is None) is (expected is None)
            if expected is not None:
                close(parameter.grad, expected)


@ranks(2)
def test_each_rank_keeps_its_stage_and_frees_the_memory_of_others(rank: int, world: int) -> None:
    accelerator = pipelined()
    model = make_model(layers=4)
    optimizer = ADAMW(groups_of(model))
    alive = [weakref.ref(parameter) for parameter in model.parameters()]
    assert accelerator.pipeline_parallel_rank == rank
    model, optimizer = accelerator.prepare(model, optimizer)
    gc.collect()
    assert sum(one() is not None for one in alive) == sum(1 for _ in model.parameters()) < len(alive)
    inner = accelerator.unwrap_model(model)
    held = {name.split(".")[0] + "." + name.split(".")[1] for name, _ in inner.named_parameters()}
    assert (
        held
        == [
            {"embedding.weight", "positions.weight", "blocks.0", "blocks.1"},
            {"blocks.2", "blocks.3", "norm.weight", "norm.bias", "head.weight"},
        ][rank]
    )
    assert [len(group["params"]) > 0 for group in optimizer.param_groups] == [True, True]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    own = {id(one) for one in inner.parameters()}
    assert {id(one) for group in optimizer.param_groups for one in group["params"]} == own
    assert list(accelerator.get_state_dict(model)) == list(make_model(layers=4).state_dict())
    with pytest.raises(RuntimeError, match=r"is on another rank. Call the prepared model"):
        inner(IDS)


@ranks(2)
def test_an_optimizer_made_after_the_model_was_prepared(rank: int, world: int) -> None:
    accelerator = pipelined()
    model = accelerator.prepare_model(make_model())
    optimizer = accelerator.prepare_optimizer(ADAMW(model.parameters()))
    loader = accelerator.prepare(make_loader(8))
    train(model, optimizer, accelerator.backward, loader, 2)
    full = make_model()
    other = ADAMW(full.parameters())
    train(full, other, torch.Tensor.backward, make_loader(8), 2)
    state = accelerator.engine.full_optimizer_state(optimizer)
    assert state["param_groups"][0]["params"] == other.state_dict()["param_groups"][0]["params"]
    for index, entry in other.state_dict()["state"].items():
        close(state["state"][index]["exp_avg"], entry["exp_avg"])


@pytest.mark.parametrize("average_over", ["steps", "window"])
@ranks(2)
def test_gradients_accumulate(rank: int, world: int, average_over: str) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, average_over=average_over)  # type: ignore[arg-type]
    accelerator = pipelined(accumulation=plugin)
    model = make_model(tied=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(4, count=32))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(token_loss(model(batch["input_ids"]), shift(batch["labels"])))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    full = make_model(tied=True)
    other = torch.optim.SGD(full.parameters(), lr=0.5)
    for batch in make_loader(8, count=32):
        token_loss(full(batch["input_ids"]), shift(batch["labels"])).backward()
        nn.utils.clip_grad_norm_(full.parameters(), 1.0)
        other.step()
        other.zero_grad()
    actual = accelerator.get_state_dict(model)
    for name, tensor in full.state_dict().items():
        close(actual[name], tensor)


class Scored(nn.Module):
    """Has parameters of its own beside the blocks, a buffer, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model(layers=4)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.calls += 1
        logits = self.model(input_ids) * self.scale
        return (logits,) if labels is None else (token_loss(logits, shift(labels)), logits)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@ranks(2)
def test_outputs(rank: int, world: int, schedule: str) -> None:
    accelerator = pipelined(schedule)
    model = accelerator.prepare(Scored())
    full = Scored()
    loss, logits = model(IDS, labels=IDS)
    expected, expected_logits = full(IDS, labels=IDS)
    close(loss, expected)
    assert loss.requires_grad
    if schedule == "gpipe" and rank == 1:
        close(logits, expected_logits)
    else:
        assert logits is None
    model.eval()
    with torch.no_grad():
        for size in (8, 3, 1):
            actual, everything = model(IDS[:size], labels=IDS[:size])
            close(actual, full(IDS[:size], IDS[:size])[0])
            close(everything, full(IDS[:size])[0])
    assert accelerator.unwrap_model(model).calls == 2 + 2 + 1 + 1  # once for each microbatch, measuring left no trace


@ranks(2)
def test_a_parameter_outside_of_the_stages_stays_equal(rank: int, world: int) -> None:
    accelerator = pipelined("1f1b")
    model = Scored()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    full = Scored()
    for _ in range(3):
        accelerator.backward(model(IDS, labels=IDS)[0])
        optimizer.step()
        optimizer.zero_grad()
        full(IDS, labels=IDS)[0].backward()
        with torch.no_grad():
            for parameter in full.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
                parameter.grad = None
    close(accelerator.unwrap_model(model).scale, full.scale)
    everywhere = accelerator.gather(accelerator.unwrap_model(model).scale.detach())
    assert everywhere[0] == everywhere[1]


@ranks(2)
def test_parameters_can_be_frozen_and_losses_weighted(rank: int, world: int) -> None:
    labels = IDS.clone()
    labels[:5, 4:] = -100
    accelerator = pipelined("1f1b", loss_weight=lambda batch: (batch["labels"][:, 1:] != -100).sum())
    model, full = Scored(), Scored()
    for one in (model, full):
        for name, parameter in one.named_parameters():
            parameter.requires_grad = "head" in name or "norm" in name
    model = accelerator.prepare(model)
    loss, expected = model(IDS, labels=labels)[0], full(IDS, labels=labels)[0]
    close(loss, expected)
    accelerator.backward(loss)
    expected.backward()
    close_gradients(accelerator, model, full)


@ranks(2)
def test_two_forwards_before_the_backward(rank: int, world: int) -> None:
    accelerator = pipelined()
    model, full = accelerator.prepare(make_model()), make_model()
    loss = model(IDS[:4]).square().mean() + model(IDS[4:]).mean()
    accelerator.backward(loss)
    (full(IDS[:4]).square().mean() + full(IDS[4:]).mean()).backward()
    close_gradients(accelerator, model, full)
    loss = model(IDS).mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once for each forward"):
        loss.backward()


@ranks(2)
def test_activation_checkpointing(rank: int, world: int) -> None:
    from torch.utils.checkpoint import checkpoint

    class Frugal(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner = make_model()
            self.blocks, self.inner.blocks = self.inner.blocks, nn.ModuleList()
            self.reentrant = reentrant

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.inner.embedding(ids)
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
            return hidden

    accelerator = pipelined()
    model, full = accelerator.prepare(Frugal(False)), Frugal(False)
    accelerator.backward(model(IDS).square().mean())
    full(IDS).square().mean().backward()
    close_gradients(accelerator, model, full)
    with pytest.raises(RuntimeError, match="use_reentrant.: False"):
        accelerator.prepare(Frugal(True))(IDS)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def run(accelerator: Accelerator, tmp_path: Path, load: bool, save: bool) -> tuple[list[float], dict[str, Any]]:
    model = make_model(layers=4, tied=True)
    optimizer = ADAMW(groups_of(model))
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(8 // accelerator.engine.num_averaged))
    if load:
        accelerator.load_state(tmp_path / "state")
    losses = train(model, optimizer, accelerator.backward, loader, 3)
    if save:
        accelerator.save_state(tmp_path / "state")
        losses += train(model, optimizer, accelerator.backward, loader, 3)
    return losses, accelerator.get_state_dict(model)


@ranks(2)
def test_a_checkpoint_resumes_in_a_pipeline(rank: int, world: int, tmp_path: Path) -> None:
    losses, _ = run(pipelined(), tmp_path, load=False, save=True)
    AcceleratorState._reset_state()
    again, _ = run(pipelined(), tmp_path, load=True, save=False)
    assert again == losses[3:]


@pytest.mark.thorough
@ranks(4)
@pytest.mark.parametrize("before", ["replicas", "shards"])
def test_a_checkpoint_resumes_in_a_longer_pipeline_and_without_one(
    rank: int, world: int, tmp_path: Path, before: str
) -> None:
    replicas = partial(pipelined, copies=2)
    losses, weights = run(replicas() if before == "replicas" else sharded(), tmp_path, load=False, save=True)
    for make in (partial(pipelined, stages=4), replicas, sharded, partial(Accelerator, cpu=True)):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        again, actual = run(make(), tmp_path, load=True, save=False)
        assert make is not replicas or again == pytest.approx(losses[3:], abs=1e-5)
        for name, tensor in weights.items():
            close(actual[name].cpu(), tensor)


@ranks(4)
def test_parameters_of_a_stage_can_be_sharded(rank: int, world: int) -> None:
    accelerator = sharded()
    model = make_model(layers=4)
    optimizer = ADAMW(groups_of(model))
    model, optimizer = accelerator.prepare(model, optimizer)
    own = {id(parameter) for parameter in model.parameters()}
    assert {id(one) for group in optimizer.param_groups for one in group["params"]} == own
    local = sum(to_local(parameter).numel() for parameter in model.parameters())
    assert local * 2 == sum(parameter.numel() for parameter in model.parameters())


@ranks(2)
def test_what_does_not_fit_is_refused_everywhere(rank: int, world: int, tmp_path: Path) -> None:
    accelerator = pipelined()
    accelerator.prepare(make_model(layers=4))
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    for other in (make_model(layers=2), make_model(layers=4, width=8)):
        accelerator.prepare(other)
        with pytest.raises(RuntimeError, match=r"(?s)Missing|Unexpected|size mismatch"):
            accelerator.load_state(tmp_path / "state")
        accelerator.free_memory()


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_microbatches": 1}, r"num_microbatches=1 would leave some of the 2 stages idle .* at least 2"),
        ({"schedule": "interleaved1f1b", "num_microbatches": 5}, "must be a multiple of pp_size=2"),
        (
            {"schedule": "1f1b", "broadcast_outputs": True},
            "broadcast_outputs=True needs the outputs .* Choose schedule='gpipe'",
        ),
    ],
)
@ranks(2)
def test_settings_that_cannot_be(rank: int, world: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipelined(**settings)


@ranks(2)
def test_combinations_that_cannot_be(rank: int, world: int) -> None:
    for options, message in (
        ({"mixed_precision": "fp16"}, "Choose 'bf16' or 'no'"),
        ({"dynamo_backend": "eager"}, "Compile the blocks of the model"),
    ):
        with pytest.raises(ValueError, match=message):
            Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2), **options)
    for sizes, message in (
        ({"dp_shard_size": 2}, r"Pass FullyShardedDataParallelPlugin\(fsdp_version=2\)"),
        ({"dp_shard_size": 2, "tp_size": 2}, "cannot be combined with tp"),
    ):
        engine = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2)).engine
        assert isinstance(engine, PipelinedEngine)
        engine._config = ParallelismConfig(pp_size=2, **sizes)
        with pytest.raises(ValueError, match=message):
            engine.check()
        AcceleratorState._reset_state()
    with pytest.raises(ValueError, match="pp_size=3 = 3 processes, but the run has 2"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=3))


@ranks(2)
def test_models_and_batches_that_do_not_fit(rank: int, world: int) -> None:
    accelerator = pipelined(num_microbatches=4, schedule="1f1b")
    with pytest.raises(ValueError, match="cannot be split into 2 stages"):
        accelerator.prepare(nn.Linear(2, 2))
    model = accelerator.prepare(make_model())
    with pytest.raises(
        ValueError, match=r"batch of 6 cannot be split into num_microbatches=4 .* num_microbatches = 2, 3, 6"
    ):
        model(IDS[:6])
    with pytest.raises(ValueError, match="TinyTransformer must return its loss.*schedule='gpipe'"):
        model(IDS)
    with pytest.raises(ValueError, match="no tensor with a batch dimension"):
        model()
    with pytest.raises(ValueError, match="output_attentions=True in the arguments"):
        model(IDS, output_attentions=True)


class Wayward(nn.Module):
    """Registers its last layer first, and may leave one out."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in map(int, self.order):
            x = self.layers[number](x)
        return x


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("order", "message"),
    [("0213", "not called in the order"), ("01", "ended without calling a module of stage 1"), ("0123", None),
     ("012301", "'layers.0' is called more often"), ("01123", "calls 'layers.1' more than once")],
)  # fmt: skip
@ranks(2)
def test_modules_out_of_order(rank: int, world: int, order: str, message: str | None) -> None:
    model = pipelined().prepare(Wayward(order))
    if message is None:
        assert model(torch.ones(4, 4)).shape == (4, 4)
    else:
        with pytest.raises(RuntimeError, match=message):
            model(torch.ones(4, 4))


class Leaking(nn.Module):
    """Uses, after the last block, what an earlier block returned."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.keep = keep
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("nothing", torch.full((), float("nan")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return x + first if self.keep else x * self.nothing


@ranks(2)
def test_skip_connections_between_stages_are_refused_and_nan_of_the_model_is_not(rank: int, world: int) -> None:
    accelerator = pipelined()
    message = r"Stage 1 of Leaking computes with what modules of other stages return"
    with pytest.raises((ValueError, RuntimeError), match=message):
        accelerator.prepare(Leaking(keep=True))(torch.ones(4, 4))
    assert accelerator.prepare(Leaking(keep=False))(torch.ones(4, 4)).isnan().all()


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@ranks(2)
def test_transformers(rank: int, world: int, schedule: str) -> None:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16}
    mask = torch.ones_like(IDS)
    mask[0, 9:] = 0
    accelerator = pipelined(schedule)
    for name, config in (
        ("GPT2LMHeadModel", transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2, eos_token_id=0, bos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )),
        ("LlamaForCausalLM", transformers.LlamaConfig(**sizes, intermediate_size=16, num_key_value_heads=2)),
    ):  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            full = getattr(transformers, name)(config)
            torch.manual_seed(0)
            model = accelerator.prepare(getattr(transformers, name)(config))
        batch = {"input_ids": IDS, "attention_mask": mask, "labels": IDS, "num_items_in_batch": torch.tensor(120)}
        loss, expected = model(**batch).loss, full(**batch).loss
        close(loss, expected)
        accelerator.backward(loss)
        expected.backward()
        tied = ("transformer.wte.weight", "lm_head.weight")  # added up before a step
        close_gradients(accelerator, model, full, without=tied)
        if name == "LlamaForCausalLM":
            with pytest.raises(ValueError, match="output_hidden_states=True"):
                model(**batch, output_hidden_states=True)


@ranks(2)
def test_schedulers_step_once_for_a_batch_and_the_last_one_may_be_smaller(rank: int, world: int) -> None:
    accelerator = pipelined(num_microbatches=4)
    model = make_model()
    optimizer = ADAMW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = make_loader(8, count=11)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    sizes = []
    for batch in loader:
        outputs = model(batch["input_ids"])
        accelerator.backward(outputs.mean())
        optimizer.step()
        scheduler.step()
        sizes.append(len(outputs))
    assert sizes == [8, 3]
    assert scheduler.get_last_lr() == [0.75e-3]
