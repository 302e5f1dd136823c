"""`accelerate estimate-memory`: sizes of models that are never loaded."""

from __future__ import annotations

import json
import socket
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from accel_cli.errors import UsageError
from accel_cli.estimate import building, hub
from accel_cli.estimate.building import add_timm_hub_prefix, check_has_model, create_empty_model
from accel_cli.estimate.command import estimate_command_parser, gather_data
from accel_cli.estimate.headers import read_headers
from accel_cli.estimate.report import create_ascii_table
from accel_cli.estimate.sizes import estimate_training_usage, measure_folder, measure_model
from accel_cli.estimate.source import find_model
from accel_cli.main import COMMANDS, main
from accel_cli.rehearse.command import OLDEST_TORCH
from accel_state.libraries import is_torch_version
from tests.cli.estimated import model_folder, tensor_file
from tests.cli.running import PROGRAM, python, refusal, run

NO_MODEL = ["estimate-memory", "org/model"]


@pytest.fixture(autouse=True)
def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_a_local_folder_is_estimated_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    model_folder(tmp_path, "llama")
    monkeypatch.chdir(tmp_path)
    assert main(["estimate-memory", "llama", "--dtypes", "float32", "bfloat16", "int4"]) == 0
    said = capsys.readouterr().out
    assert "│ dtype  │Largest Layer│Total Size│Training using Adam│\n" in said
    words = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines()]
    assert ["float32", "36.25 KB", "97.66 KB", "390.62 KB"] in words
    assert [row[3] for row in words if row[:1] == ["int4"]] == ["16.11 KB"]  # 97.66 / 8 + 4 * 0.9766
    assert "int4: weights are frozen, and LoRA adapters with 1% as many parameters are trained" in said


def test_the_figures_are_those_of_the_model_as_it_was_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = create_empty_model(model_folder(tmp_path, "llama"), None)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {p.device.type for p in model.parameters()} == {"meta"}
    config = transformers.AutoConfig.from_pretrained(tmp_path / "llama")
    real = transformers.LlamaForCausalLM(config)
    total = sum(p.nbytes for p in real.parameters()) + sum(b.nbytes for b in real.buffers())
    assert measure_model(model).total == total
    args = estimate_command_parser().parse_args([str(tmp_path / "llama")])
    assert gather_data(args)[1] == [
        "float16", 36.25 * 512, total / 2, {"model": total, "optimizer": 2 * total, "gradients": 1.5 * total, "step": 2 * total}
    ]  # fmt: skip


def test_models_that_ask_for_values_while_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(source: Any, trust_remote_code: bool) -> nn.Module:
        rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        return nn.Sequential(*(nn.Linear(4, 4) for _ in rates))

    monkeypatch.setitem(building.BUILDERS, "timm", picky)
    monkeypatch.setitem(building.INSTALLED, "timm", lambda: True)
    assert measure_model(create_empty_model("anything", "timm")).total == 3 * 4 * 20


def test_tied_weights_count_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tied, apart = (
        measure_model(create_empty_model(model_folder(tmp_path, "gpt2", tie_word_embeddings=tie), None)).total
        for tie in (True, False)
    )
    assert apart - tied == 4 * 100 * 32


def test_timm_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timm = pytest.importorskip("timm")
    folder = model_folder(tmp_path, "resnet")
    size = measure_model(create_empty_model(folder, None))
    real = timm.create_model("resnet18", num_classes=10)
    assert size.total == sum(t.nbytes for t in real.state_dict().values())
    assert size.layer_names == ("layer4.0.conv2", "layer4.1.conv1", "layer4.1.conv2")
    assert size.largest_layer == 512 * 512 * 9 * 4
    assert type(create_empty_model("resnet18", "timm")) is type(real)
    misspelt = model_folder(tmp_path, "resnet", architecture="resnet81")
    assert "Did you mean 'resnet18'?" in refusal(capsys, "estimate-memory", misspelt)


@pytest.mark.parametrize(
    ("dtype", "parts"), [("float32", (1, 2, 1, 4)), ("float16", (1, 2, 1.5, 2)), ("int8", None), ("bfloat16", (1, 2, 1.5, 2))]
)  # fmt: skip
def test_training_with_adam(dtype: str, parts: tuple[float, ...] | None) -> None:
    wanted = [-1] * 4 if parts is None else [1000 * part for part in parts]
    assert list(estimate_training_usage(1000, dtype).values()) == wanted


# ---- folders with nothing but tensors -------------------------------------------------------------------------------


def test_files_with_tensors_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensor_file(
        tmp_path / "a.safetensors", {"emb.weight": ("BF16", [10, 4], 80), "blocks.0.fc.weight": ("BF16", [4, 4], 32)}
    )
    tensor_file(tmp_path / "b.safetensors", {"blocks.0.fc.bias": ("F32", [30], 120)})
    assert main(["estimate-memory", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["library"] is None
    assert told["largest_layers"] == ["blocks.0"]
    assert (told["dtypes"][0]["total_bytes"], told["dtypes"][0]["largest_layer_bytes"]) == (4 * 86, 4 * 46)
    assert [header.num_bytes for header in read_headers(tmp_path)] == [80, 32, 120]
    assert "Estimate its sizes alone" in refusal(capsys, "estimate-memory", str(tmp_path), "--training")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\xff\xff\xff\x05\0\0\0\0{}",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x03\0\0\0\0\0\0\0{1}",
        (17).to_bytes(8, "little") + b'{"a": {"dtype":1}',
        (34).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[-1]}}',
        (34).to_bytes(8, "little") + b'{"a":{"dtype":"X99","shape":[12]}}',
    ],
)
def test_damaged_tensor_files_are_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match="damaged or not a safetensors file"):
        measure_folder(tmp_path)


# ---- what can be wrong ----------------------------------------------------------------------------------------------


def answer(status: int) -> Any:
    return SimpleNamespace(status_code=status, headers={}, request=None, url="")


def hub_error(name: str, status: int | None = None) -> Exception:
    from huggingface_hub import errors

    kind = getattr(errors, name)
    error: Exception = kind.__new__(kind)
    Exception.__init__(error, "what the library says\nand more")
    if status is not None:
        error.response = answer(status)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "message", "told"),
    [
        (hub_error("GatedRepoError", 403), "The Hub denies access to 'org/model' (403)", "gated"),
        (hub_error("RepositoryNotFoundError", 404), "The model 'org/model' was not found on the Hub", False),
        (hub_error("RepositoryNotFoundError", 401), "if it is private", False),
        (hub_error("HfHubHTTPError", 401), "The Hub denies access to 'org/model' (401)", "gated"),
        (hub_error("HfHubHTTPError", 503), "The Hub returned status 503", UsageError),
        (hub_error("OfflineModeIsEnabled"), "offline: what the library says)", UsageError),
        (ConnectionError("no route"), "offline: no route)", UsageError),
        (hub_error("HFValidationError"), "neither a folder nor a valid name on the Hub", UsageError),
        (KeyError("surprise"), "failed (KeyError: 'surprise')", UsageError),
    ],
)
def test_what_the_hub_answers_is_said_in_one_line(
    error: Exception, message: str, told: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> NoReturn:
        raise error

    monkeypatch.setattr("huggingface_hub.model_info", fail)
    said = refusal(capsys, *NO_MODEL)
    assert message in said
    assert ("gated" in said or "denies" in said) == (told == "gated")
    if told is UsageError:
        with pytest.raises(UsageError, match="Hub|failed"):
            hub.verify_on_hub("org/model")
    else:
        assert hub.verify_on_hub("org/model") == told


@pytest.mark.parametrize(
    ("library", "message"), [(None, "does not have the library"), ("diffusers", "is of the library 'diffusers'")]
)
def test_models_of_other_libraries(
    library: str | None, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.model_info", lambda *args, **kwargs: SimpleNamespace(library_name=library))
    assert message in refusal(capsys, *NO_MODEL)
    assert hub.verify_on_hub("org/model").library_name == library


def test_a_model_on_the_hub_is_built_from_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    folder = Path(model_folder(tmp_path, "resnet"))
    monkeypatch.setattr("huggingface_hub.model_info", lambda *args, **kwargs: SimpleNamespace(library_name="timm"))
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *args, **kwargs: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *args, **kwargs: str(folder / "config.json"))
    assert type(create_empty_model("timm/resnet18", None)).__name__ == "ResNet"
    source = find_model("timm/resnet18")
    assert (source.library, source.folder, source.config["num_classes"]) == ("timm", None, 10)


def test_without_a_network_the_hub_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def refuse(*where: Any, **_: Any) -> NoReturn:
        asked.append(where)
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    words = ["estimate-memory", "org/model", "--library_name", "transformers"]
    assert "'org/model' is not a folder, and the Hub cannot be reached" in refusal(capsys, *words)
    assert len(asked) <= 2, "no address family more than once"
    pytest.importorskip("transformers")
    cached = tmp_path / "models--org--model"
    for folder in ("refs", "snapshots/1"):
        (cached / folder).mkdir(parents=True)
    (cached / "refs" / "main").write_text("1")
    Path(model_folder(tmp_path, "bert"), "config.json").rename(cached / "snapshots" / "1" / "config.json")
    assert main(words) == 0, "what was downloaded before is there"
    assert "org/model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        (None, [], "has no config.json and no safetensors files"),
        (None, ["--library_name", "transformers"], "has no config.json"),
        ("{", [], "cannot be read"),
        ("[]", [], "holds a list"),
        ("{}", [], "Give --library_name"),
        ('{"model_type": "lama"}', [], "Did you mean 'llama'?"),
        ('{"model_type": "llama", "architectures": ["LlamaForCausalML"]}', [], "Did you mean 'LlamaForCausalLM'?"),
        ('{"model_type": "llama", "architectures": ["Trainer"]}', [], "is not a model of transformers"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}', [], "then add --trust_remote_code"),
        ('{"architecture": "local-dir:/etc"}', [], "names no architecture"),
        ('{"model_type": "bert", "hidden_size": 7}', [], "cannot be built (ValueError"),
    ],
)
def test_folders_that_are_no_models(
    config: str | None, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("timm")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert message in refusal(capsys, "estimate-memory", str(tmp_path), *words)


@pytest.mark.parametrize("name", ["./missing", "/missing", "~/missing", "a/b/c"])
def test_paths_are_never_looked_up_on_the_hub(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"The folder {name!r} does not exist" in refusal(capsys, "estimate-memory", name)


def test_a_configuration_loads_nothing(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("timm")
    create_empty_model(model_folder(tmp_path, "resnet", model_args={"checkpoint_path": "x", "pretrained": True}), None)
    create_empty_model(model_folder(tmp_path, "llama", attn_implementation="somebody/kernel"), None)


@pytest.mark.thorough
def test_code_of_a_model_runs_only_when_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "mine.py").write_text(
        "import torch\nfrom transformers import PretrainedConfig, PreTrainedModel\n"
        "class MineConfig(PretrainedConfig):\n    model_type = 'mine'\n"
        "class MineModel(PreTrainedModel):\n    config_class = MineConfig\n"
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.layer = torch.nn.Linear(4, 4)\n        self.post_init()\n"
    )
    names = {"AutoConfig": "mine.MineConfig", "AutoModel": "mine.MineModel"}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "mine", "architectures": ["MineModel"], "auto_map": names})
    )
    with pytest.raises(UsageError, match="needs code of its repository"):
        create_empty_model(str(folder), None)
    program = "import sys; from accel_cli.estimate.building import create_empty_model as make; print(make(sys.argv[1], None, True))"
    done = python("-c", program, str(folder))
    assert "MineModel" in done.stdout, done.stderr


def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(building.INSTALLED, "timm", lambda: False)
    folder = model_folder(tmp_path, "resnet")
    assert "pip install 'accelerate[estimate]'" in refusal(capsys, "estimate-memory", folder)
    with pytest.raises(ImportError, match="timm"):
        create_empty_model(folder, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_devices", "2"], "needs --parallel"),
        (["--parallel", "fsdp"], "needs --num_devices"),
        (["--device", "h200"], "--device h200 needs --parallel"),
        (["--training", "--batch_size", "0"], "--batch_size must be at least 1, got 0"),
        (["--sequence_length", "5"], "Add --training or --parallel"),
        (["--optimizer", "sgd"], "Add --training or --parallel"),
    ],
)
def test_options_that_do_not_fit(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, *NO_MODEL, *words)


def test_models_that_are_unknown_to_their_library() -> None:
    pytest.importorskip("transformers")
    assert check_has_model(OSError("x does not appear to have a file named config.json")) == "transformers"
    assert check_has_model(ValueError("x")) == "unknown"
    pytest.importorskip("timm")
    assert check_has_model(RuntimeError("Unknown model (x)")) == "timm"
    assert add_timm_hub_prefix(add_timm_hub_prefix("timm/x")) == "hf-hub:timm/x"
    for name in ("resnet18", "resnet18.a1_in1k", "local-dir:/a/b"):
        assert add_timm_hub_prefix(name) == name


# ---- several devices ------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_one_of_several_devices_is_rehearsed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if not is_torch_version(">=", OLDEST_TORCH):
        pytest.skip(f"needs torch {OLDEST_TORCH}")
    words = [
        "estimate-memory",
        model_folder(tmp_path, "llama"),
        *["--num_devices", "4", "--sequence_length", "16", "--json"],
    ]
    others = {"ACCELERATE_MIXED_PRECISION": "bf16", "HF_HOME": str(tmp_path)}  # not of this estimate

    def memory(*flags: str) -> dict[str, Any]:
        done = run(PROGRAM, *words, *flags, **others)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text(
        "num_processes: 2\nnum_machines: 2\nmachine_rank: 1\n"
    )
    replicated = memory("--parallel", "ddp", "--training")
    states, ddp = replicated["states_bytes"], replicated["per_device"]["at_peak"]
    assert (ddp["parameters"], ddp["optimizer state"]) == (states["parameters"], states["optimizer"])
    assert replicated["per_device"]["world_size"] == 4
    sharded = memory("--parallel", "fsdp", "--optimizer", "sgd-momentum")["per_device"]
    assert sharded["at_peak"]["optimizer state"] == pytest.approx(states["parameters"] / 4, rel=0.01)
    assert {exchange["name"] for exchange in sharded["exchanges"]} == {"all-gather", "reduce-scatter"}
    assert sharded["peak_bytes"] < replicated["per_device"]["peak_bytes"]


def test_what_cannot_be_rehearsed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "nets.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self): super().__init__(3, 3)\n"
    )
    words = ["--parallel", "fsdp", "--num_devices", "2"]
    network = f"{tmp_path / 'nets.py'}:Net"
    assert "accelerate rehearse train.py" in refusal(capsys, "estimate-memory", network, *words)
    if is_torch_version(">=", OLDEST_TORCH):
        folder = model_folder(tmp_path, "gpt2")
        said = refusal(capsys, "estimate-memory", folder, *words, "--device", "h1000")
        assert "--device 'h1000' is not in the table" in said
        said = refusal(capsys, "estimate-memory", folder, "--parallel", "tp", "--num_devices", "2")
        assert "--parallel tp: ValueError: tp_size=2 needs a plan" in said


# ---- the rest -------------------------------------------------------------------------------------------------------


def test_tables_line_up() -> None:
    assert create_ascii_table(["dtype", "size"], [["float32", "1 KB"], ["x", 2]], "A long title, longer") == (
        "┌──────────────────────┐\n"
        "│ A long title, longer │\n"
        "├───────┬──────────────┤\n"
        "│ dtype │     size     │\n"
        "├───────┼──────────────┤\n"
        "│float32│     1 KB     │\n"
        "│   x   │      2       │\n"
        "└───────┴──────────────┘"
    )


def test_older_programs_may_call_it(tmp_path: Path) -> None:
    args = Namespace(
        model_name=model_folder(tmp_path, "resnet"), library_name="timm", dtypes=["int8"], trust_remote_code=False
    )
    pytest.importorskip("timm")
    assert gather_data(args)[0][0] == "int8"
    assert COMMANDS["estimate-memory"].module == "accel_cli.estimate.command"


OWN_CLASS = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layer = torch.nn.Linear(width, width, bias=False)

NUMBER = 3
def make_number():
    return NUMBER
"""


def test_a_class_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_nets.py").write_text(OWN_CLASS)
    monkeypatch.chdir(tmp_path)
    for name in ("own_nets.py:Net", "own_nets:Net", str(tmp_path / "own_nets.py:Net")):
        assert main(["estimate-memory", name, "--arguments", '{"width": 16}', "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["dtypes"][0]["total_bytes"] == 16 * 16 * 4
    assert main(["estimate-memory", "own_nets.py:Net", "--training"]) == 0
    printed_text = capsys.readouterr().out
    assert "int8, int4: weights are frozen, and LoRA adapters with 1%" in printed_text
    assert "N/A" not in printed_text
    assert "Without activations" in printed_text
    sys.modules.pop("own_nets")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["own_nets.py:Nett"], "own_nets.py has no 'Nett'. Did you mean 'Net'?"),
        (["own_nets.py:Net", "--arguments", "{"], "--arguments is not valid JSON"),
        (["own_nets.py:Net", "--arguments", "[3]"], "--arguments must be a JSON object"),
        (["own_nets.py:Net", "--arguments", '{"wide": 3}'], "cannot be made with {'wide': 3} (TypeError"),
        (["own_nets.py:make_number"], "made a int, which is not a torch.nn.Module"),
        (["absent.py:Net"], "The file 'absent.py' does not exist"),
        (["no_such_module:Net"], "no_such_module cannot be imported"),
        ([".", "--arguments", "{}"], "--arguments are those of a class"),
    ],
)
def test_a_class_that_cannot_be_made(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_nets.py").write_text(OWN_CLASS)
    monkeypatch.chdir(tmp_path)
    assert reason in refusal(capsys, "estimate-memory", *words)
