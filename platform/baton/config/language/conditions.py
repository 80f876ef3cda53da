"""Conditions on requests, such as `prompt_tokens > 8000`."""

from __future__ import annotations

import re
from typing import NamedTuple

from baton.policy.admission.slo_classes import Comparison

PATTERN = r"^\s*prompt_tokens\s*(>=|<=|>|<)\s*([0-9]{1,9})\s*$"
"""Only the prompt's length is known when a request's class is determined."""


class PromptCondition(NamedTuple):
    """A condition on a prompt's length."""

    comparison: Comparison
    tokens: int

    def __str__(self) -> str:
        return f"prompt_tokens {self.comparison} {self.tokens}"


def parse_condition(text: str) -> PromptCondition | None:
    """The condition in `text`; None when it is invalid."""
    match = re.fullmatch(PATTERN, text)
    return None if match is None else PromptCondition(Comparison(match[1]), int(match[2]))
