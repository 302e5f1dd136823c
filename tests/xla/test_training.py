"""Training through torch_xla on its CPU runtime: one device, and 2 and 4 by SPMD, against plain torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.xla.problem import GLOBAL_BATCH, NUM_SAMPLES, plain_losses
from tests.xla.running import devices, needs_torch_xla, results_of

pytestmark = needs_torch_xla
NUM_BATCHES = -(-NUM_SAMPLES // GLOBAL_BATCH)
Seen = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {count: tmp_path_factory.mktemp(f"on{count}") for count in (1, 2, 4)}


@pytest.fixture(scope="module")
def seen(folders: dict[int, Path]) -> Seen:
    """What each process saw, by its number of devices; that with 4 also loads what the one with 2 has saved."""

    def train(count: int, *others: str) -> dict[str, Any]:
        return results_of("trained.py", folders[count], *others, **devices(count))

    with ThreadPoolExecutor(2) as pool:
        first = dict(zip((1, 2), pool.map(train, (1, 2)), strict=True))
    return first | {4: train(4, str(folders[2]))}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("how", ["trained", "sharded"])
def test_losses_are_those_of_plain_torch(seen: Seen, count: int, how: str) -> None:
    if how in seen[count]:
        assert seen[count][how]["losses"] == pytest.approx(plain_losses(), abs=1e-5)
    else:
        assert (count, how) == (1, "sharded")
    assert seen[count]["every_batch_a_step"]["losses"] == pytest.approx(plain_losses(accumulation=1), abs=1e-5)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_bfloat16_by_autocast(seen: Seen, count: int) -> None:
    for how in ("bf16", "sharded bf16")[: 1 if count == 1 else 2]:
        losses = seen[count][how]["losses"]
        assert losses == pytest.approx(plain_losses(), abs=1e-2)
        assert losses != pytest.approx(plain_losses(), abs=1e-6)  # it was not computed in float32
        assert seen[count][how]["dtypes"] == ["torch.float32"]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("how", ["trained", "every_batch_a_step", "bf16", "sharded"])
def test_nothing_is_compiled_once_every_kind_of_step_was_seen(seen: Seen, count: int, how: str) -> None:
    """The first and second window differ, for the optimizer has no state at first; the last batch is padded."""
    if how == "sharded" and count == 1:
        return
    compiled = seen[count][how]["compiled"]
    first_steps = 2 if how == "every_batch_a_step" else 4
    assert len(set(compiled[first_steps:])) == 1
    assert compiled[0] < compiled[-1]


@pytest.mark.parametrize("count", [2, 4])
def test_how_parameters_are_sharded(seen: Seen, count: int) -> None:
    replicated, sharded = seen[count]["trained"], seen[count]["sharded"]
    assert set(replicated["specs"].values()) == {"{replicated}"}
    numbers = ",".join(map(str, range(count)))
    assert sharded["specs"]["embed.weight"] == f"{{devices=[{count},1]{numbers}}}"
    assert sharded["specs"]["head.weight"] == f"{{devices=[1,{count}]{numbers}}}"  # along its largest dimension
    assert sharded["moment"] == sharded["specs"]["embed.weight"]
    assert (sharded["class"], sharded["unwrapped"]) == ("SpmdFullyShardedDataParallel", "Net")
    assert replicated["tied"]
    assert sharded["tied"]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_are_synchronized_at_the_end_of_a_window(seen: Seen, count: int) -> None:
    assert seen[count]["trained"]["synced"] == [False, True] * NUM_BATCHES


@pytest.mark.parametrize("count", [1, 2, 4])
def test_loaders(seen: Seen, count: int) -> None:
    actual = seen[count]["loaders"]
    assert actual["sizes"] == actual["split"] == actual["streamed"] == [GLOBAL_BATCH] * NUM_BATCHES
    assert actual["all in order"]  # gather_for_metrics() drops the padding
    assert actual["stream in order"]
    assert actual["orders differ"]
    assert actual["all of them"] == [NUM_SAMPLES, NUM_SAMPLES]
    numbers = ",".join(map(str, range(count)))
    assert actual["specs"] == ([""] if count == 1 else [f"{{devices=[{count},1]{numbers}}}"])
    assert actual["is MpDeviceLoader"]
    assert (actual["wraps"], actual["rest wraps"]) == ("DataLoaderShard", "MpDeviceLoaderWrapper")
    assert (actual["total_batch_size"], actual["total_dataset_length"]) == (GLOBAL_BATCH, NUM_SAMPLES)
    assert (actual["length"], actual["device"], actual["epoch"]) == (NUM_BATCHES, "xla:0", 3)
    assert actual["rest"] == [GLOBAL_BATCH] * (NUM_BATCHES - 2)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_operations_in_one_process(seen: Seen, count: int) -> None:
    actual = seen[count]["operations"]
    assert actual["gather"] == actual["reduce"] == actual["broadcast"] == actual["pad"] == [[0, 1], [2, 3], [4, 5]]
    assert actual["objects"] == ["a", "b"]
    assert actual["trigger"] is True
    assert (actual["processes"], actual["type"], actual["engine"]) == (1, "XLA", "xla")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_random_numbers(seen: Seen, count: int) -> None:
    actual = seen[count]["random"]
    assert actual["first"] == actual["again"] != actual["second"]
    assert actual["after"] == actual["restored"]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_checkpoint_continues_the_run(seen: Seen, folders: dict[int, Path], count: int) -> None:
    saved, loaded = seen[count]["saved"], seen[count]["loaded"]
    assert loaded["losses"] == pytest.approx(saved["losses"], abs=1e-6)
    assert loaded["same specs"]
    assert saved["devices"] == ["cpu"]
    assert saved["compiled anew"] == 0
    assert {"state/model.safetensors", "state/optimizer.bin", "model/model.safetensors"} <= set(saved["files"])
    weights = load_file(folders[count] / "model" / "model.safetensors")
    assert set(weights) == set(saved["names"]) - {"second.weight"}  # tied to "first.weight"
    assert weights["head.weight"].shape == (1, 16)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_checkpoint_in_the_middle_of_a_window(seen: Seen, count: int) -> None:
    actual = seen[count]["window"]
    assert actual["resumed"] == pytest.approx(actual["losses"], abs=1e-6)
    assert actual["synced"] == [True, False, True]
    assert seen[count]["pickled"] == ["MpDeviceLoaderWrapper", True, NUM_BATCHES]


def test_saved_on_2_devices_and_loaded_on_4(seen: Seen) -> None:
    loaded = seen[4]["loaded other"]
    assert loaded["losses"] == pytest.approx(seen[2]["saved"]["losses"], abs=1e-5)
    assert loaded["moments"] == ["{devices=[1,4]0,1,2,3}", "{devices=[4,1]0,1,2,3}"]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_steps_run_also_without_a_prepared_loader(seen: Seen, count: int) -> None:
    actual = seen[count]["without loader"]
    assert actual["ran"] >= 4
    assert actual["losses"] == sorted(actual["losses"], reverse=True)


REFUSED = {
    "fp16": "mixed_precision='fp16' is not supported on this 'xla' device",
    "fsdp1": "fsdp_version=1 does not train on XLA devices: pass .*fsdp_version=2",
    "offload": r"cpu_offload=\.\.\.\) has no effect on XLA devices",
    "deepspeed": "DeepSpeed",
    "tp": "torch_tp_plugin=TorchTensorParallelPlugin cannot train on 'xla'",
    "mesh": "ParallelismConfig uses tp, but XLA devices are arranged by torch_xla",
}
REFUSED_ALONE = {
    "fsdp2": r"shards parameters on XLA devices by SPMD, which is off. Call torch_xla.runtime.use_spmd\(\)",
    "late": r"use_spmd\(\) was called after the first .* XLA_USE_SPMD=1",
}
REFUSED_UNDER_SPMD = {
    "axes": "global mesh has the axes 'model', but parameters are sharded along 'fsdp'",
    "split": "cannot split batches of . evenly over . devices",
}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_cannot_be_done_is_refused(seen: Seen, count: int) -> None:
    actual = seen[count]["refused"]
    expected = REFUSED | (REFUSED_ALONE if count == 1 else REFUSED_UNDER_SPMD)
    assert set(actual) == set(expected)
    for name, pattern in expected.items():
        with pytest.raises(RuntimeError, match=pattern):
            raise RuntimeError(actual[name])
