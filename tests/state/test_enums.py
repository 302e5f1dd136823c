"""The words of the field: values, text form, membership."""

from __future__ import annotations

import pickle

import pytest

from accel_state.enums import (
    BaseEnum,
    CustomDtype,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    LoggerType,
    PrecisionType,
    RNGType,
)


def test_values_and_members_are_contained_and_others_are_not() -> None:
    assert "bf16" in PrecisionType
    assert PrecisionType.BF16 in PrecisionType
    assert "bf17" not in PrecisionType
    assert None not in RNGType


@pytest.mark.parametrize("enum", [PrecisionType, DynamoBackend, LoggerType, RNGType, DDPCommunicationHookType])
def test_members_print_as_their_value(enum: type[BaseEnum]) -> None:
    assert [str(member) for member in enum] == enum.list() == [member.value for member in enum]


def test_text_enums_equal_their_text_and_survive_pickling() -> None:
    assert DistributedType.MULTI_CPU == "MULTI_CPU"
    assert PrecisionType.NO == "no"
    assert str(DistributedType.NO) == "DistributedType.NO"
    assert CustomDtype.FP8 != "fp8"
    assert pickle.loads(pickle.dumps(DistributedType.FSDP)) is DistributedType.FSDP
