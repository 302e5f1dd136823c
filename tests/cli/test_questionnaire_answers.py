"""Whatever is answered, the launcher reads it back."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

import accel_state.libraries
from accel_cli.arguments import Flag
from accel_cli.configfile.read import load_config_from_file
from accel_cli.configfile.schema import BaseConfig, ClusterConfig
from accel_cli.configfile.write import write_config
from accel_cli.errors import MissingFileError
from accel_cli.launch import machine
from accel_cli.launch.flags.table import find, is_option
from accel_cli.launch.settings import LaunchSettings
from accel_cli.launch.validate import check_settings
from accel_cli.launch.values import coerce
from accel_cli.questionnaire.answer import Choice, Number, Text, Truth, Words
from accel_cli.questionnaire.answer import Path as PathKind
from accel_cli.questionnaire.cluster import TOPICS, get_user_input
from accel_cli.questionnaire.prompts import Prompts, Read
from accel_cli.questionnaire.sagemaker import TOPICS as SAGEMAKER_TOPICS
from tests.cli.pretended import Listed, settings_of, value_in
from tests.support.short_run import examples

TYPED = (
    "", "1", "2", "4", "8", "0", "0.5", "A", "A, B", "0,1,2,3,4,5,6,7", "all", "10.0.0.1", "X=1", "false,true,no",
    "host@other:0", "/etc/hosts", "a b",
)  # fmt: skip
NOT_OPTIONS = {"tpu_name", "tpu_zone", "command_file", "commands", "compute_environment", "distributed_type"}
OTHER_NAMES = {"tpu_vm": "vm", "tpu_env": "env"}
OLD_LIBRARY = "MS-AMP is no longer maintained"


class Drawn(Prompts):
    """Answers with whatever is drawn and accepted."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def say(self, line: str) -> None:
        pass

    def ask_text(self, text: str, usual: str, read: Read) -> Any:
        return self._first(TYPED, read)

    def ask_truth(self, text: str, usual: str, read: Read) -> Any:
        return self._first(("yes", "no"), read)

    def ask_choice(self, text: str, choice: Choice, usual: str, read: Read) -> Any:
        return self._first(choice.labels, read)

    def _first(self, lines: Any, read: Read) -> Any:
        start = self.data.draw(st.integers(0, len(lines) - 1))
        for line in (*lines[start:], *lines[:start], ""):
            try:
                return read(line)
            except ValueError as error:
                reason = error
        raise AssertionError(f"nothing is accepted: {reason}")


def row_of(name: str) -> Flag:
    row = find(name)
    assert row is not None, name
    return row


def differences(config: BaseConfig, resolved: LaunchSettings) -> dict[str, tuple[Any, Any]]:
    """What the file says and the launcher has not understood in the same way."""
    flat: dict[str, Any] = {}
    for key, value in config.to_dict().items():
        flat |= value if isinstance(value, dict) else {key: value}
    wanted = {OTHER_NAMES.get(key, key): value for key, value in flat.items() if key not in NOT_OPTIONS}
    found = {key: (coerce(row_of(key), value, key), value_in(resolved, key)) for key, value in wanted.items()
             if key != "use_cpu"}  # fmt: skip
    return {key: pair for key, pair in found.items() if pair[0] != pair[1]}


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(["a.yaml", "a.json"]))
def test_any_answers_give_a_file_that_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject, name: str
) -> None:
    monkeypatch.setattr(accel_state.libraries, "is_fp8_available", lambda: True)
    monkeypatch.setattr(machine, "is_free", lambda port: True)  # another test may listen there just now
    config = get_user_input(Drawn(data))
    path = tmp_path / name
    write_config(path, config)
    assert load_config_from_file(path) == config
    if isinstance(config, ClusterConfig):
        resolved = settings_of("--config_file", str(path), "-", machine=Listed(mpi="mpirun (Open MPI) 4.1.4"))
        assert [note for note in resolved.notes if OLD_LIBRARY not in note] == []
        assert differences(config, resolved) == {}
        assert resolved.use_cpu == config.use_cpu
        if not resolved.use_parallelism_config:
            with suppress(MissingFileError):  # of a DeepSpeed file that is nowhere
                check_settings(resolved)


@pytest.mark.parametrize("topics", [TOPICS, SAGEMAKER_TOPICS], ids=["own machines", "SageMaker"])
def test_every_usual_answer_is_an_answer(topics: Any) -> None:
    for topic in topics:
        for question in topic.questions:
            usual = None if callable(question.default) else question.default
            if usual is not None:
                assert question.kind.read(question.kind.spell(usual)) == usual, question.key


@pytest.mark.parametrize("topics", [TOPICS, SAGEMAKER_TOPICS], ids=["own machines", "SageMaker"])
def test_every_saved_answer_is_a_setting(topics: Any) -> None:
    fields = {field for kind in (ClusterConfig, *BaseConfig.__subclasses__()) for field in kind.__dataclass_fields__}
    for topic in topics:
        assert not topic.section or topic.section in fields
        for question in topic.questions:
            if question.is_saved:
                assert is_option(question.key) if topic.section else question.key in fields, question.key


@given(st.text(max_size=20))
@example("²")
@example("1_000")
@example("inf")
@example("nan")
def test_no_kind_of_answer_fails_otherwise(text: str) -> None:
    for kind in (Choice((("a", "b"), (1, "c"))), Truth(), Number(0, 9), Number(0, 9, False), Text(), Text(True),
                 PathKind(), Words(), Words(r"\w+", "a word", ";")):  # fmt: skip
        with suppress(ValueError):
            value = kind.read(text)
            assert kind.read(kind.spell(value)) == value


def test_the_page_lists_every_question() -> None:
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    questions = [question for topic in (*TOPICS, *SAGEMAKER_TOPICS) for question in topic.questions]
    missing = [question.key for question in questions if f"| {question.text} |" not in page]
    missing += [question.key for question in questions if question.is_saved and f"`{question.key}`" not in page]
    assert missing == []
