"""Questions as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accel_cli.questionnaire.answer import Kind

Answers = Mapping[str, Any]
Condition = Callable[[Answers], bool]


def always(answers: Answers) -> bool:
    """Ask whatever was answered before."""
    return True


def never_wrong(value: Any, answers: Answers) -> str:
    """Find nothing wrong with an answer."""
    return ""


def said(key: str, *values: Any) -> Condition:
    """Ask when an earlier question got one of these answers; without values, when it was answered with yes."""
    return lambda answers: answers.get(key) in values if values else bool(answers.get(key))


def every(*conditions: Condition) -> Condition:
    """Ask when all of the conditions hold."""
    return lambda answers: all(condition(answers) for condition in conditions)


def opposite(condition: Condition) -> Condition:
    """Ask when a condition does not hold."""
    return lambda answers: not condition(answers)


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        key: The setting that the answer becomes. Two rows may share one key when never both are asked.
        text: The question.
        kind: What can be answered.
        default: The answer when nothing is said: a value, or a function of the earlier answers. None where there is
            no usual answer.
        asked_when: Given the earlier answers, whether to ask.
        wrong: Given a value and the earlier answers, says what is wrong with it; an empty text for nothing.
        is_required: Whether an answer is needed where there is no default; without one, the setting is left out.
        is_saved: Whether the answer becomes a setting, or only decides what is asked next.
    """

    key: str
    text: str
    kind: Kind
    default: Any = None
    asked_when: Condition = always
    wrong: Callable[[Any, Answers], str] = never_wrong
    is_required: bool = True
    is_saved: bool = True

    def usual(self, answers: Answers) -> Any:
        """Return the default after these answers."""
        return self.default(answers) if callable(self.default) else self.default

    def read(self, text: str, answers: Answers) -> Any:
        """Turn what was typed into a value.

        Args:
            text: What was typed; nothing means the default.
            answers: The earlier answers.

        Raises:
            ValueError: With the reason why this is no answer.
        """
        text = text.strip()
        if not text:
            usual = self.usual(answers)
            if usual is None and self.is_required:
                raise ValueError("An answer is needed here.")
            return usual
        value = self.kind.read(text)
        if reason := self.wrong(value, answers):
            raise ValueError(reason)
        return value


@dataclass(frozen=True, slots=True)
class Topic:
    """Questions that belong together.

    Attributes:
        title: The heading above them.
        questions: The rows, in the order in which they are asked.
        section: The section of the settings file that takes the answers; empty for none.
        asked_when: Given the earlier answers, whether the topic concerns this machine at all.
    """

    title: str
    questions: tuple[Question, ...]
    section: str = ""
    asked_when: Condition = always
