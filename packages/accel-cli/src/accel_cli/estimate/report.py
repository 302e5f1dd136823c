"""The estimate as text and as JSON."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from accel_cli.estimate.sizes import ADAPTER_SHARE, QUANTIZED, FormatRow, ModelSize
from accel_cli.estimate.training_report import ModelStates, TrainingStep
from accel_cli.rehearse.devices import Device
from accel_cli.rehearse.report import as_json, as_text
from accel_cli.rehearse.result import Result

FORMAT_HEADERS = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]


@dataclass(frozen=True, slots=True)
class Report:
    """A complete estimate.

    Attributes:
        args: The command line.
        library: The library of the model.
        size: The size of the model in float32.
        formats: Its size in each dtype.
        states: The model states of training; None without training.
        step: A training step; None without training.
        rehearsal: Of one of several devices, and its device; None without `--parallel`.
    """

    args: Namespace
    library: str | None
    size: ModelSize
    formats: list[FormatRow]
    states: ModelStates | None = None
    step: TrainingStep | None = None
    rehearsal: tuple[Result, Device] | None = None

    def format_table(self) -> list[list[Any]]:
        """One row of text for each dtype."""
        return [
            [row.dtype, readable(row.largest_layer), readable(row.total), readable(row.adam)] for row in self.formats
        ]

    def as_text(self) -> str:
        """The report as tables of text."""
        tables = [
            create_ascii_table(
                FORMAT_HEADERS, self.format_table(), f"Memory Usage for loading `{self.args.model_name}`"
            )
        ]
        if self.states is not None:
            tables.append(create_ascii_table(["one device", "memory"], self._training_rows(), self._title()))
        text = "\n".join([*tables, *self._notes()])
        if self.rehearsal is None:
            return text
        return f"{text}\n\n{as_text(f'{self.args.model_name}, {self.args.parallel}', *self.rehearsal)}"

    def _notes(self) -> Iterator[str]:
        """What figures assume, and why one is missing."""
        if quantized := [row.dtype for row in self.formats if row.dtype in QUANTIZED]:
            yield (
                f"{', '.join(quantized)}: weights are frozen, and LoRA adapters with {ADAPTER_SHARE:.0%} as many parameters are "
                "trained in float32 with Adam."
            )
        if any(row.adam < 0 for row in self.formats):
            yield "N/A: weights in float8 alone are not trained; FP8 training keeps them in float32 or bfloat16."
        if self.states is not None and self.step is None:
            yield "Without activations: what a forward pass takes is not known for this kind of model."

    def as_json(self) -> str:
        """The report as JSON, with sizes in bytes."""
        content: dict[str, Any] = {
            "model": self.args.model_name,
            "library": self.library,
            "largest_layers": list(self.size.layer_names),
            "dtypes": [
                {
                    "dtype": row.dtype,
                    "largest_layer_bytes": round(row.largest_layer),
                    "total_bytes": round(row.total),
                    "training_with_adam_bytes": None if row.adam < 0 else round(row.adam),
                    "training_parts_bytes": None
                    if row.adam < 0
                    else {part: round(size) for part, size in row.training.items()},
                }
                for row in self.formats
            ],
        }
        if self.states is not None:
            content["states_bytes"] = {
                name: getattr(self.states, name) for name in ("parameters", "buffers", "gradients", "optimizer")
            }
        if self.step is not None:
            content["training"] = {
                **self._settings(),
                "activations_bytes": self.step.activations,
                "weight_copies_bytes": self.step.weight_copies,
                "peak_bytes": self.step.peak.peak_bytes,
                "peak_in": self.step.peak.name,
                "phases": [
                    {"phase": phase.name, "peak_bytes": phase.peak_bytes, "at_peak_bytes": phase.at_peak}
                    for phase in self.step.phases
                ],
            }
        if self.rehearsal is not None:
            content["per_device"] = {"parallel": self.args.parallel} | json.loads(as_json(*self.rehearsal))
        return json.dumps(content, indent=2)

    def _settings(self) -> dict[str, Any]:
        names = ("optimizer", "batch_size", "sequence_length", "mixed_precision", "gradient_checkpointing")
        return {name: getattr(self.args, name) for name in names}

    def _title(self) -> str:
        args = self.args
        words = [f"Training step with {args.optimizer}", f"batch size {args.batch_size}"]
        if args.sequence_length:
            words.append(f"{args.sequence_length} tokens")
        if args.mixed_precision != "no":
            words.append(args.mixed_precision)
        if args.gradient_checkpointing:
            words.append("gradient checkpointing")
        return ", ".join(words)

    def _training_rows(self) -> list[list[str]]:
        assert self.states is not None
        rows = _state_rows(self.states.parameters + self.states.buffers, self.states.gradients, self.states.optimizer)
        if self.step is None:
            return rows
        rows.append(["activations", readable(self.step.activations)])
        if self.step.weight_copies:
            rows.append([f"weights in {self.args.mixed_precision}", readable(self.step.weight_copies)])
        rows += [[f"peak, {phase.name}", readable(phase.peak_bytes)] for phase in self.step.phases]
        return [*rows, ["peak", readable(self.step.peak.peak_bytes)]]


def _state_rows(parameters: int, gradients: int, optimizer: int) -> list[list[str]]:
    return [
        ["parameters", readable(parameters)],
        ["gradients", readable(gradients)],
        ["optimizer state", readable(optimizer)],
    ]


def readable(num_bytes: float) -> str:
    """A number of bytes with a unit; negative numbers mean that it does not apply."""
    from accel_ops.memory import convert_bytes

    return "N/A" if num_bytes < 0 else convert_bytes(num_bytes)


def create_ascii_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], title: str) -> str:
    """Draw a table.

    Args:
        headers: One for each column.
        rows: One value for each column.
        title: Above the table.
    """
    lines = [list(map(str, line)) for line in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[-1] += max(0, len(title) + 2 - (sum(widths) + len(widths) - 1))
    bars = ["─" * width for width in widths]
    head, *body = ("│" + "│".join(map(str.center, line, widths)) + "│" for line in lines)
    return "\n".join([
        "┌" + "─".join(bars) + "┐",
        "│" + title.center(sum(widths) + len(widths) - 1) + "│",
        "├" + "┬".join(bars) + "┤",
        head,
        "├" + "┼".join(bars) + "┤",
        *body,
        "└" + "┴".join(bars) + "┘",
    ])  # fmt: skip
