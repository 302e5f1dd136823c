"""Going through questions, and from the answers to what a settings file holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accel_cli.questionnaire.prompts import Prompts
from accel_cli.questionnaire.question import Answers, Question, Topic


def interview(topics: Iterable[Topic], prompts: Prompts, answers: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask what the earlier answers do not rule out.

    Args:
        topics: The questions.
        prompts: Who asks.
        answers: What is known already; it grows.

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
    """Ask one question until the answer can be used, and return its value."""
    usual = question.usual(answers)
    spelled = "" if usual is None else question.kind.spell(usual)
    return question.kind.ask(prompts, question.text, spelled, lambda text: question.read(text, answers))


def settings_of(topics: Iterable[Topic], answers: Answers) -> dict[str, Any]:
    """Arrange answers as a settings file does.

    Args:
        topics: The questions that were asked.
        answers: What `interview` gave.

    Returns:
        Key -> value, and section -> key -> value. What was answered with nothing is left out.
    """
    values: dict[str, Any] = {}
    for topic in topics:
        rows = [row.key for row in topic.questions if row.is_saved and answers.get(row.key) is not None]
        home = values.setdefault(topic.section, {}) if topic.section and rows else values
        home.update({key: answers[key] for key in rows})
    return values
