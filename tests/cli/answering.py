"""Somebody who answers the questions of `accelerate config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_cli.questionnaire.answer import Choice
from accel_cli.questionnaire.prompts import Prompts, Read


class Prepared(Prompts):
    """Knows the answers beforehand, and takes what is usual where nothing was prepared.

    Args:
        answers: A part of the question -> what is typed.
    """

    def __init__(self, answers: Mapping[str, str]) -> None:
        self.answers = dict(answers)
        self.typed: list[str] = []
        self.said: list[str] = []
        self.questions: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def ask_text(self, text: str, usual: str, read: Read) -> Any:
        fitting = [part for part in self.answers if part in text]
        assert len(fitting) <= 1, f"{fitting} all fit {text!r}"
        assert fitting or usual or "othing" in text, f"no answer to {text!r}"
        line = self.answers[fitting[0]] if fitting else ""
        self.questions.append(text)
        self.typed.append(line)
        return read(line)

    ask_truth = ask_text

    def ask_choice(self, text: str, choice: Choice, usual: str, read: Read) -> Any:
        return self.ask_text(text, usual, read)

    @property
    def lines(self) -> str:
        """What was typed, as a pipe would bring it."""
        return "".join(f"{line}\n" for line in self.typed)
