"""Ranges and names that several keys share."""

from __future__ import annotations

from baton.config.language.fields import NamePattern
from baton.config.language.scalars import Bounds

Positive = Bounds(low=1)
NotNegative = Bounds(low=0)
Port = Bounds(low=1, high=65535)
Workers = Bounds(low=1, high=256)
# A shorter timeout is an error of unit.
Timeout = Bounds(low=0.001, high=86_400)
Latency = Bounds(low=0.001, high=86_400, typical=0.1)
Priority = Bounds(low=-100, high=100)
Share = Bounds(low=0.001, high=1)
Fraction = Bounds(low=0, high=1)

ModelName = NamePattern(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", "letters, digits, '.', '_', '/', '-'")
PoolName = NamePattern(
    r"[a-z](?:[a-z0-9]|[_-](?=[a-z0-9])){0,47}",
    "lower-case letters and digits with single '_' or '-' between them, a letter first",
)
ClassName = NamePattern(
    r"[a-z](?:[a-z0-9]|[_-](?=[a-z0-9])){0,47}",
    "lower-case letters and digits with single '_' or '-' between them, a letter first",
)
TenantName = NamePattern(
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?",
    "at most 64 letters, digits, '.', '_' and '-', a letter or digit at both ends",
)
VariableName = NamePattern(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")
ArgumentName = NamePattern(r"[a-z][a-z0-9_]*", "a vLLM argument with underscores, as seed")
LabelName = NamePattern(
    r"(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?",
    "the name of a node's label, as ray.io/accelerator-type",
)
