"""Environment variables are read with a type and left as they were."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from accel_state import environment
from accel_state.environment import (
    CPUInformation,
    are_libraries_initialized,
    clear_environment,
    convert_dict_to_env_variables,
    get_cpu_distributed_information,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
)
from accel_state.hardware import get_current_device_type


@pytest.mark.parametrize(("words", "meant"), [("y Yes T true ON 1", True), ("n NO f False off 0", False)])
def test_words_for_true_and_false(words: str, meant: bool) -> None:
    for word in words.split():
        assert str_to_bool(word) == int(meant)
        assert str_to_bool(word, to_bool=True) is meant


@pytest.mark.parametrize("word", ["", " true", "2", "maybe"])
def test_anything_else_is_refused_with_the_choices(word: str) -> None:
    with pytest.raises(ValueError, match=f"{word!r} is not a bool: use one of .*true"):
        str_to_bool(word)


def test_flags_and_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_FLAG", raising=False)
    assert parse_flag_from_env("SOME_FLAG") is False
    assert parse_flag_from_env("SOME_FLAG", default=True) is True
    monkeypatch.setenv("SOME_FLAG", "on")
    assert parse_flag_from_env("SOME_FLAG") is True
    monkeypatch.setenv("SOME_FLAG", "perhaps")
    with pytest.raises(ValueError, match="SOME_FLAG: 'perhaps'"):
        parse_flag_from_env("SOME_FLAG")
    monkeypatch.delenv("SOME_CHOICE", raising=False)
    assert parse_choice_from_env("SOME_CHOICE") == "no"
    monkeypatch.setenv("SOME_CHOICE", "bf16")
    assert parse_choice_from_env("SOME_CHOICE") == "bf16"


def test_the_first_variable_with_a_number_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIRST", raising=False)
    monkeypatch.setenv("SECOND", "-1")
    monkeypatch.setenv("THIRD", "3")
    assert get_int_from_env(["FIRST", "SECOND", "THIRD"], 7) == 3
    assert get_int_from_env(["FIRST", "SECOND"], 7) == 7
    monkeypatch.setenv("FIRST", "many")
    with pytest.raises(ValueError, match="FIRST is 'many'"):
        get_int_from_env(["FIRST"], 7)


def test_patching_sets_upper_case_text_and_takes_it_back() -> None:
    os.environ["PATCHED_BEFORE"] = "old"

    @patch_environment(patched_before=2, patched_new=True)
    def fail() -> None:
        assert (os.environ["PATCHED_BEFORE"], os.environ["PATCHED_NEW"]) == ("2", "True")
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.environ["PATCHED_BEFORE"] == "old"
    assert "PATCHED_NEW" not in os.environ


def test_clearing_hides_everything_and_forgets_what_comes() -> None:
    before = dict(os.environ)
    with clear_environment():
        assert not os.environ
        os.environ["NEW_HERE"] = "1"
    assert dict(os.environ) == before


def test_libraries_already_imported() -> None:
    assert are_libraries_initialized("os", "pytest", "no_such_library") == ["os", "pytest"]


def test_lines_for_a_shell_leave_out_what_it_could_misread(caplog: pytest.LogCaptureFixture) -> None:
    lines = convert_dict_to_env_variables({"GOOD": "a=b", "BAD": "1; rm -rf /"})
    assert lines == ["GOOD=a=b\n"]
    assert "'BAD' with value '1; rm -rf" in caplog.text
    assert caplog.records[0].name == "accelerate.utils.environment"


def test_a_process_knows_its_place_alone_and_in_an_mpi_run() -> None:
    with clear_environment():
        assert get_cpu_distributed_information() == CPUInformation(0, 1, 0, 1)
        os.environ["OMPI_COMM_WORLD_RANK"] = "3"
        with pytest.raises(ValueError, match="OMPI_COMM_WORLD_SIZE is not"):
            get_cpu_distributed_information()
        rest = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        os.environ.update(rest)
        assert get_cpu_distributed_information() == CPUInformation(3, 4, 1, 2)


def test_scripts_for_gpus_are_assumed_where_there_is_no_accelerator() -> None:
    assert get_current_device_type() == ("cuda", "MULTI_GPU")


# ---- purging --------------------------------------------------------------------------------------------------------


def _own_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(environment.OWN_PREFIX)}


@purge_accelerate_environment
def _plain(fail: bool) -> str:
    os.environ["ACCELERATE_NEW"] = "1"
    os.environ.pop("ACCELERATE_KEPT")
    os.environ["NOT_OURS"] = "1"
    if fail:
        raise KeyError
    return "result"


def test_a_function_leaves_our_variables_as_they_were() -> None:
    os.environ["ACCELERATE_KEPT"] = "yes"
    before = _own_variables()
    assert _plain(fail=False) == "result"
    with pytest.raises(KeyError):
        _plain(fail=True)
    assert _own_variables() == before
    assert os.environ["NOT_OURS"] == "1"


def test_generators_and_coroutines_are_purged_when_they_end() -> None:
    @purge_accelerate_environment
    def generator() -> Iterator[int]:
        os.environ["ACCELERATE_NEW"] = "1"
        yield 1

    @purge_accelerate_environment
    async def coroutine() -> int:
        os.environ["ACCELERATE_NEW"] = "1"
        return 2

    @purge_accelerate_environment
    async def async_generator() -> AsyncIterator[int]:
        os.environ["ACCELERATE_NEW"] = "1"
        yield 3

    async def collect() -> list[int]:
        return [item async for item in async_generator()]

    before = _own_variables()
    assert list(generator()) == [1]
    assert asyncio.run(coroutine()) == 2
    assert asyncio.run(collect()) == [3]
    assert _own_variables() == before


def test_the_tests_of_a_class_and_of_its_children_are_purged() -> None:
    seen = []

    class Registered:
        def __init_subclass__(cls, **kwargs: object) -> None:
            seen.append(cls.__name__)

    @purge_accelerate_environment
    class Tests(Registered):
        def set_up(self) -> None:
            os.environ["ACCELERATE_SETUP"] = "1"

        def test_method(self) -> str:
            os.environ["ACCELERATE_NEW"] = "1"
            return os.environ["ACCELERATE_SETUP"]

        @staticmethod
        def test_static() -> None:
            os.environ["ACCELERATE_NEW"] = "1"

        @classmethod
        def test_class(cls) -> type:
            os.environ["ACCELERATE_NEW"] = "1"
            return cls

    class More(Tests):
        test_data = 5

        def test_more(self) -> None:
            os.environ["ACCELERATE_NEW"] = "1"

    more = More()
    more.set_up()
    assert more.test_method() == "1"
    more.test_static()
    assert more.test_class() is More
    more.test_more()
    assert "ACCELERATE_NEW" not in os.environ
    assert os.environ["ACCELERATE_SETUP"] == "1"
    assert seen == ["Tests", "More"]
