"""Compiled models compute the same, share their parameters and can be unwrapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from accel_integrations.compile import compile_model, compile_regions, compile_regions_deepspeed
from accel_integrations.unwrap import extract_model_from_parallel
from accel_ops.modules import has_compiled_regions, is_compiled_module
from accel_state.settings.compile import TorchDynamoPlugin
from accelerate import Accelerator
from tests.integrations.training import (
    FEATURES,
    Blocks,
    assert_same_gradients,
    loss_of,
    new_batch,
    new_engine,
    new_model,
    prepare,
)
from tests.support.ranks import ranks

# the compiler looks at gradients of intermediate results and hides the warning in a way that pytest undoes
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counts:
    """A compiler that counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward  # type: ignore[no-any-return]


def new_blocks() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


@pytest.mark.takes_turns
@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_outputs_and_gradients_stay(backend: str, regional: bool) -> None:
    model, alone = new_blocks(), new_blocks()
    compiled = compile_model(model, TorchDynamoPlugin(backend=backend, use_regional_compilation=regional))  # type: ignore[arg-type]
    assert is_compiled_module(compiled) is not regional
    assert has_compiled_regions(compiled)
    batch = new_batch(3)
    torch.testing.assert_close(compiled(batch), alone(batch))
    loss_of(compiled, batch).backward()
    loss_of(alone, batch).backward()
    assert_same_gradients(model, alone)


@pytest.mark.parametrize("regional", [False, True])
def test_what_is_compiled_already_or_not_to_be_is_left_alone(regional: bool) -> None:
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)  # type: ignore[arg-type]
    compiled = compile_model(new_blocks(), plugin)
    assert compile_model(compiled, plugin) is compiled
    model = new_blocks()
    assert compile_model(model, TorchDynamoPlugin(use_regional_compilation=regional)) is model


def test_one_block_is_compiled_for_all() -> None:
    compiler = Counts()
    with torch.no_grad():
        compile_regions(new_blocks(), backend=compiler)(new_batch(3))
    assert compiler.graphs == 2  # a block and the head
    model, compiler = new_blocks(), Counts()
    model.forward = model.forward  # type: ignore[method-assign] # some libraries put it on the instance
    compile_regions(model, backend=compiler)(new_batch(3))
    assert compiler.graphs > 0


def test_regions_share_parameters_with_the_original() -> None:
    model = new_blocks()
    model.register_module("nothing", None)
    compiled = compile_regions(model, backend="eager")
    assert compiled._modules["nothing"] is None
    assert type(compiled) is Blocks
    assert [id(parameter) for parameter in compiled.parameters()] == [id(each) for each in model.parameters()]
    assert not has_compiled_regions(model)
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    assert extract_model_from_parallel(compiled) is compiled
    assert is_compiled_module(compile_regions(new_model(), backend="eager")), "in full, without repeated blocks"


def test_regions_run_compiled_under_mixed_precision_too() -> None:
    compiler = Counts()
    model = prepare(new_engine("bf16"), new_blocks())
    expected = model(new_batch(3))
    compiled = compile_regions(model, backend=compiler)
    torch.testing.assert_close(compiled(new_batch(3)), expected)
    assert compiler.graphs > 0
    plain = extract_model_from_parallel(compiled, keep_fp32_wrapper=False)
    assert plain is compiled
    assert "forward" not in vars(compiled)
    assert "forward" not in vars(model)


def test_blocks_can_be_compiled_in_place() -> None:
    compiler = Counts()
    model = new_blocks()
    expected = new_blocks()(new_batch(3))
    compile_regions_deepspeed(model, backend=compiler)
    assert not has_compiled_regions(model)  # the modules are the same, only their calls are compiled
    torch.testing.assert_close(model(new_batch(3)), expected)
    assert compiler.graphs > 0


@pytest.mark.parametrize("make", [new_blocks, partial(nn.Linear, FEATURES, 2)], ids=["blocks", "a layer by itself"])
def test_full_models_compile_with_mixed_precision(make: Callable[[], nn.Module]) -> None:
    compiler = Counts()
    model = prepare(new_engine("bf16"), make())
    expected = model(new_batch(3))
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    torch.testing.assert_close(compiled(new_batch(3)), expected)
    assert expected.dtype == torch.float32
    assert compiler.graphs == 1


def test_models_compiled_by_the_user_can_be_prepared() -> None:
    compiled = torch.compile(new_blocks(), backend="eager")
    model = prepare(new_engine("bf16"), compiled)
    assert model is compiled
    assert model(new_batch(3)).dtype == torch.float32
    extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert model(new_batch(3)).dtype == torch.float32
    assert "_original_forward" not in vars(model)
    assert type(extract_model_from_parallel(model, keep_torch_compile=False)) is Blocks


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_compiles_regions() -> None:
    model = new_blocks()
    compiled = compile_model(model, TorchDynamoPlugin(backend="inductor", use_regional_compilation=True))  # type: ignore[arg-type]
    with torch.no_grad():
        torch.testing.assert_close(compiled(new_batch(3)), new_blocks()(new_batch(3)))


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@ranks(2)
@pytest.mark.parametrize("regional", [False, True])
def test_compiled_replicas_train_equally(rank: int, world: int, regional: bool) -> None:
    torch._dynamo.reset()
    engine = new_engine()
    replica = prepare(engine, new_blocks())
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)  # type: ignore[arg-type]
    model = compile_model(replica, plugin)
    batches = new_batch(8).chunk(2)
    with engine.no_sync(model):
        engine.backward(loss_of(model, batches[0][rank::world]) / 2)
    engine.backward(loss_of(model, batches[1][rank::world]) / 2)
    alone = new_blocks()
    loss_of(alone, torch.cat(batches)).backward()
    assert_same_gradients(replica, alone)
    assert engine.unwrap(model) is replica.module
    assert set(engine.full_state_dict(model)) == set(alone.state_dict())
    kept = extract_model_from_parallel(model)
    assert is_compiled_module(kept) is not regional
    assert has_compiled_regions(kept)
    torch.testing.assert_close(kept(new_batch(2)), alone(new_batch(2)))
    torch._dynamo.reset()


@ranks(2)
def test_what_looks_at_the_first_step_breaks_no_graph(rank: int, world: int) -> None:
    from torch._dynamo.utils import counters

    model = Accelerator(cpu=True).prepare(nn.Linear(2, 1))
    counters.clear()
    torch.compile(model, backend="eager")(torch.ones(1, 2))
    assert [reason for reason in counters["graph_break"] if "Handle" in reason] == []
