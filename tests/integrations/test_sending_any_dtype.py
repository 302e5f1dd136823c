"""Tensors between ranks of a group: dtypes that NCCL does not have, and receives that are posted ahead."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_integrations.parallel.module_states import broadcast_to_group, sync_module_states
from accel_integrations.parallel.pipeline.gradients import GradientSync, sync_shared_parameters
from accel_integrations.parallel.pipeline.group import PipelineGroup
from accel_integrations.parallel.pipeline.shapes import TensorShape
from accel_integrations.parallel.pipeline.stage import StagedModel
from accel_integrations.parallel.wire import as_sent
from accel_state.mesh import ParallelismConfig
from accel_state.settings.parallelism import PipelineParallelConfig
from accelerate import Accelerator
from tests.support.ranks import ranks
from tests.support.tiny_transformer import make_loader, make_model, shift, token_loss

OF_NCCL = {"float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"}
UNUSUAL = (
    torch.tensor([[1 + 2j, 3 - 4j]]).conj(),
    torch.tensor([[-5, 6]], dtype=torch.int16),
    torch.tensor(7, dtype=torch.uint16),
    torch.tensor([[0.5, 1.0]], dtype=torch.float8_e4m3fn),
)


def refuse_as_nccl(patch: pytest.MonkeyPatch) -> None:
    """A mock: gloo sends bytes between two ranks whatever they are, NCCL raises for dtypes that it does not have."""

    def checked(function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert str(tensor.dtype).removeprefix("torch.") in OF_NCCL
        assert tensor.is_contiguous()
        return function(tensor, *args, **kwargs)

    for name in ("isend", "irecv", "send", "recv", "broadcast"):
        patch.setattr(dist, name, partial(checked, getattr(dist, name)))


def test_views_share_the_memory() -> None:
    for tensor in UNUSUAL:
        plain = tensor.resolve_conj().clone()
        view = as_sent(plain)
        assert view.data_ptr() == plain.data_ptr()
        assert view.nbytes == plain.nbytes
    same = torch.ones(2)
    assert as_sent(same) is same


@ranks(2)
def test_any_dtype_is_sent_between_stages(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    group = PipelineGroup(dist.group.WORLD, 2, torch.device("cpu"))
    shapes = [TensorShape.of(tensor) for tensor in UNUSUAL]
    with pytest.MonkeyPatch.context() as patch:
        refuse_as_nccl(patch)
        if rank == 0:
            works, kept = group.send(UNUSUAL, 1)
            for work in works:
                work.wait()
            assert len(kept) == len(UNUSUAL)
        else:
            (received,) = group.receive_in_order([(shapes, 0)])
            for actual, sent in zip(received, UNUSUAL, strict=True):
                assert torch.equal(actual.view(-1).view(torch.uint8), sent.resolve_conj().view(-1).view(torch.uint8))
        for sent in UNUSUAL:
            copy = sent.clone() if rank == 0 else torch.zeros_like(sent)
            broadcast_to_group(copy, dist.group.WORLD)
            assert torch.equal(
                copy.resolve_conj().view(-1).view(torch.uint8), sent.resolve_conj().view(-1).view(torch.uint8)
            )
        shared = {"w": torch.full((2,), 1j + rank, requires_grad=True)}
        sync_shared_parameters(group, {"w": (0, 1)}, shared)
        assert shared["w"].tolist() == [1j, 1j]
        shared["w"].grad = torch.full((2,), 1 + 1j)
    operations: list[torch.dtype] = []
    with pytest.MonkeyPatch.context() as patch:
        batched = dist.batch_isend_irecv
        patch.setattr(
            dist, "batch_isend_irecv", lambda ops: operations.extend(op.tensor.dtype for op in ops) or batched(ops)
        )
        sync = GradientSync(group, {"w": (0, 1)}, shared)
        sync.note_backward()
        sync.finish()
    assert operations == [torch.float32] * 2
    assert shared["w"].grad is not None
    assert shared["w"].grad.tolist() == [2 + 2j] * 2


@ranks(2)
def test_weights_and_buffers_of_all_dtypes_come_from_the_first_rank(rank: int, world: int) -> None:
    module = nn.Linear(3, 2)
    expected = {}
    for dtype in (torch.int16, torch.uint16, torch.complex64, torch.bool, torch.float8_e4m3fn, torch.bfloat16):
        name = str(dtype).replace("torch.", "of_")
        expected[name] = torch.tensor([0, 1, 1, 0]).to(dtype)
        module.register_buffer(name, expected[name].clone() if rank == 0 else torch.zeros(4).to(dtype))
    module.register_buffer("strided", torch.full((2, 3), float(rank)).t())
    module.register_buffer("count_of", torch.tensor(rank, dtype=torch.int16))
    module.register_buffer("empty", torch.empty(0))
    sync_module_states(module, [dist.group.WORLD])
    for name, values in expected.items():
        assert torch.equal(module.get_buffer(name).view(torch.uint8), values.view(torch.uint8)), name
    assert module.strided.eq(0).all()
    assert module.count_of == 0
    weights = [torch.empty(2, 3) for _ in range(world)]
    dist.all_gather(weights, module.weight.detach())
    assert torch.equal(weights[0], weights[1])


@ranks(2)
def test_the_next_micro_batch_travels_while_a_stage_computes(rank: int, world: int) -> None:
    accelerator, model, batch = pipelined("gpipe", 1)
    model(batch["input_ids"])  # the first one measures shapes
    with pytest.MonkeyPatch.context() as patch:
        order = noted(patch)
        loss = token_loss(model(batch["input_ids"]), shift(batch["labels"]))
        expected = ["receive", "receive", "run", "receive", "run", "receive", "run", "run"]
        assert order == (expected if rank == 1 else ["run"] * 4)
        order.clear()
        accelerator.backward(loss)
        assert order == (["receive"] * 4 if rank == 0 else [])
    full = make_model(layers=4)
    token_loss(full(batch["input_ids"]), shift(batch["labels"])).backward()
    names = dict(full.named_parameters())
    for name, parameter in accelerator.unwrap_model(model).named_parameters():
        torch.testing.assert_close(parameter.grad, names[name].grad, rtol=1e-4, atol=1e-6)


@ranks(2)
def test_a_rank_with_several_stages_posts_no_receive_before_what_it_has_to_send(rank: int, world: int) -> None:
    """Between two ranks, operations run in order: the other rank would wait for what is queued behind the receive."""
    _, model, batch = pipelined("interleaved1f1b", 2)
    model.eval()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        model(batch["input_ids"])
        order = noted(patch)
        outputs = model(batch["input_ids"])
        assert "receive receive" not in " ".join(order)
        assert torch.allclose(outputs, make_model(layers=4).eval()(batch["input_ids"]), atol=1e-5)


def pipelined(schedule: Any, stages_per_rank: int) -> tuple[Accelerator, Any, Any]:
    settings = PipelineParallelConfig(schedule, 4, stages_per_rank=stages_per_rank)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=settings))
    model, loader = accelerator.prepare(make_model(layers=4), make_loader(8))
    return accelerator, model, next(iter(loader))


def noted(patch: pytest.MonkeyPatch) -> list[str]:
    """The order of posted receives and of stages that run from now on."""
    order: list[str] = []
    irecv, run = dist.irecv, StagedModel.run
    patch.setattr(dist, "irecv", lambda *args, **options: order.append("receive") or irecv(*args, **options))
    patch.setattr(StagedModel, "run", lambda *args: order.append("run") or run(*args))
    return order
