"""Questions as rows of a table, the interview, and the conversion of answers to a config file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from accel_cli.arguments import Flag
from accel_cli.launch.flags.table import find
from accel_cli.questionnaire.answer import Answer, Joined, Number, Text, Truth, choice
from accel_cli.questionnaire.prompts import Prompts

Answers = Mapping[str, Any]
Condition = Callable[[Answers], bool]


def always(answers: Answers) -> bool:
    """Ask in any case."""
    return True


def never_wrong(value: Any, answers: Answers) -> str:
    """Accept every answer."""
    return ""


def said(key: str, *values: Any) -> Condition:
    """Ask if the answer to an earlier question is one of these; without values, if it is yes."""
    return lambda answers: answers.get(key) in values if values else bool(answers.get(key))


def every(*conditions: Condition) -> Condition:
    """Ask if all of the conditions hold."""
    return lambda answers: all(condition(answers) for condition in conditions)


def opposite(condition: Condition) -> Condition:
    """Ask if a condition does not hold."""
    return lambda answers: not condition(answers)


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        key: The setting that the answer becomes. Two rows may share one key when never both are asked.
        text: The question.
        kind: The kind of answer.
        default: The value of an empty answer: a value, or a function of the earlier answers. None if there is no
            default.
        asked_when: Given the earlier answers, whether to ask.
        wrong: Given a value and the earlier answers, returns why it is not valid; an empty `str` if it is.
        is_required: Whether an answer is needed if there is no default; without one, the setting is left out.
        is_saved: Whether the answer becomes a setting, or only decides what is asked next.
    """

    key: str
    text: str
    kind: Answer
    default: Any = None
    asked_when: Condition = always
    wrong: Callable[[Any, Answers], str] = never_wrong
    is_required: bool = True
    is_saved: bool = True

    def initial(self, answers: Answers) -> Any:
        """Return the default after these answers."""
        return self.default(answers) if callable(self.default) else self.default

    def read(self, text: str, answers: Answers) -> Any:
        """Parse typed text to a value.

        Args:
            text: The typed text; if empty, the default is used. A dash leaves out what is not required.
            answers: The earlier answers.

        Raises:
            ValueError: It is not valid; the message has the reason.
        """
        text = text.strip()
        if text == "-" and not self.is_required:
            return None
        if not text:
            default = self.initial(answers)
            if default is None and self.is_required:
                raise ValueError("An answer is needed here.")
            return default
        value = self.kind.read(text)
        if reason := self.wrong(value, answers):
            raise ValueError(reason)
        return value


def about(
    name: str,
    default: Any = None,
    asked_when: Condition = always,
    *,
    kind: Answer | None = None,
    text: str = "",
    wrong: Callable[[Any, Answers], str] = never_wrong,
    is_required: bool = True,
) -> Question:
    """Make the question about an option of `accelerate launch` from its row.

    Args:
        name: The option.
        default: As for `Question`.
        asked_when: As for `Question`.
        kind: The kind of answer, if it does not follow from the row.
        text: The question; the row's help when empty.
        wrong: As for `Question`.
        is_required: As for `Question`.
    """
    option = find(name)
    assert option is not None, name
    text = text or option.help.rstrip(".")
    if not is_required and default is None and "nothing" not in text:
        text += " (nothing leaves it out)"
    return Question(name, text, kind or _answer_of(option), default, asked_when, wrong, is_required)


def _answer_of(option: Flag) -> Answer:
    """The kind of answer for an option."""
    kind = option.kind
    if option.is_switch or kind.choices == ("true", "false"):
        return Truth()
    if kind.choices:
        return choice(*kind.choices)
    if option.type.__name__ in ("int", "float"):
        return Number(*kind.limits, is_integer=option.type.__name__ == "int")
    return Joined() if kind.metavar in ("NAMES", "CLASSES") else Text()


@dataclass(frozen=True, slots=True)
class Topic:
    """Questions that belong together.

    Attributes:
        title: The heading above them.
        questions: The rows, in the order in which they are asked.
        section: The section of the config file for the answers; empty for none.
        asked_when: Given the earlier answers, whether to ask any of the questions.
    """

    title: str
    questions: tuple[Question, ...]
    section: str = ""
    asked_when: Condition = always


def interview(topics: Iterable[Topic], prompts: Prompts, answers: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask all questions whose conditions hold.

    Args:
        topics: The questions.
        prompts: The object that asks.
        answers: Earlier answers, to which the new ones are added.

    Returns:
        `answers`: question key -> value. Questions that were not asked are not in it.
    """
    answers = {} if answers is None else answers
    for topic in topics:
        titled = False
        for question in topic.questions:
            if topic.asked_when(answers) and question.asked_when(answers):
                if not titled:
                    prompts.say(f"\n{topic.title}")
                    titled = True
                answers[question.key] = ask(question, prompts, answers)
    return answers


def ask(question: Question, prompts: Prompts, answers: Answers) -> Any:
    """Ask one question until the answer is valid, and return its value."""
    default = question.initial(answers)
    spelled = "" if default is None else question.kind.spell(default)
    return question.kind.ask(prompts, question.text, spelled, lambda text: question.read(text, answers))


def settings_of(topics: Iterable[Topic], answers: Answers) -> dict[str, Any]:
    """Arrange answers in the structure of a config file.

    Args:
        topics: The questions that were asked.
        answers: The answers of `interview`.

    Returns:
        Key -> value, and section -> key -> value. Empty answers are left out.
    """
    values: dict[str, Any] = {}
    for topic in topics:
        rows = [row.key for row in topic.questions if row.is_saved and answers.get(row.key) is not None]
        home = values.setdefault(topic.section, {}) if topic.section and rows else values
        home.update({key: answers[key] for key in rows})
    return values
