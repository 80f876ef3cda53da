"""Conditions on requests as people write them: `prompt_tokens > 8000`."""

from __future__ import annotations

import re
from typing import NamedTuple

from baton.policy.admission.slo_classes import Comparison

PATTERN = r"^\s*prompt_tokens\s*(>=|<=|>|<)\s*([0-9]{1,9})\s*$"
"""Only the length of the prompt is known when a request's class is looked up."""


class PromptCondition(NamedTuple):
    """How long a prompt must be."""

    comparison: Comparison
    tokens: int

    def __str__(self) -> str:
        return f"prompt_tokens {self.comparison} {self.tokens}"


def parse_condition(text: str) -> PromptCondition | None:
    """What the text says; None when it is no condition."""
    match = re.fullmatch(PATTERN, text)
    return None if match is None else PromptCondition(Comparison(match[1]), int(match[2]))
