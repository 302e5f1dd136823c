"""How bitsandbytes quantizes a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from accel_state.enums import CustomDtype
from accel_state.public_names import known_as
from accel_state.settings.option import wrong_value

COMPUTE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
QUANT_TYPES = ("fp4", "nf4")
SWITCHES = ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant")
MODULE_LISTS = ("skip_modules", "keep_in_fp32_modules")


@known_as("accelerate.utils.dataclasses.BnbQuantizationConfig")
@dataclass
class BnbQuantizationConfig:
    """How `load_and_quantize_model` quantizes a model with bitsandbytes.

    Args:
        load_in_8bit (`bool`): Quantize weights of linear layers to 8 bits; exactly one of this and `load_in_4bit`.
        llm_int8_threshold (`float`): Inputs above it are computed in 16 bits; 0 computes all in 8 bits.
        load_in_4bit (`bool`): Quantize weights of linear layers to 4 bits.
        bnb_4bit_quant_type (`"fp4"` or `"nf4"`): The 4-bit type: a float, or a quantile of the normal distribution.
        bnb_4bit_use_double_quant (`bool`): Quantize the scales of 4-bit weights as well.
        bnb_4bit_compute_dtype (`"fp32"`, `"fp16"`, `"bf16"` or `torch.dtype`): The dtype in which 4-bit layers compute.
        torch_dtype (`torch.dtype`, *optional*): The dtype of everything that is not quantized; `"fp32"`, `"fp16"` and
            `"bf16"` are accepted, too. The dtype in which 4-bit layers compute, or float16 with 8 bits, when None.
        skip_modules (`list[str]`, *optional*): Names of modules that are not quantized. When None, the last one, and
            those that share parameters.
        keep_in_fp32_modules (`list[str]`, *optional*): Names of modules that are not quantized and stay in float32.

    Attributes:
        target_dtype: The dtype of quantized weights, by which `infer_auto_device_map` counts their size.

    Raises:
        ValueError: For an invalid value, which the message names.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None
    target_dtype: torch.dtype | CustomDtype = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise self._wrong(name, "True or False")
        if self.load_in_8bit == self.load_in_4bit:
            raise ValueError(
                f"load_in_8bit={self.load_in_8bit!r} and load_in_4bit={self.load_in_4bit!r}: set exactly one of the two."
            )
        if isinstance(self.llm_int8_threshold, bool) or not isinstance(self.llm_int8_threshold, (int, float)):
            raise self._wrong("llm_int8_threshold", "a number")
        if self.bnb_4bit_quant_type not in QUANT_TYPES:
            raise self._wrong("bnb_4bit_quant_type", "'fp4' or 'nf4'")
        self.bnb_4bit_compute_dtype = self._dtype("bnb_4bit_compute_dtype")
        if self.torch_dtype is None:
            self.torch_dtype = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16
        self.torch_dtype = self._dtype("torch_dtype")
        for name in MODULE_LISTS:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
                raise self._wrong(name, "a list of names of modules")
        self.target_dtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8

    def _dtype(self, name: str) -> torch.dtype:
        value = getattr(self, name)
        dtype = COMPUTE_DTYPES.get(value) if isinstance(value, str) else value
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise self._wrong(name, "'fp32', 'fp16', 'bf16' or a floating-point torch.dtype")
        return dtype

    def _wrong(self, name: str, expected: str) -> ValueError:
        return wrong_value(f"BnbQuantizationConfig.{name}", getattr(self, name), expected)
