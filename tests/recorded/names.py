"""What is called otherwise now than when the digests were made."""

from __future__ import annotations

from collections.abc import Mapping

OLD_NAMES: Mapping[str, str] = {}
"""New name (`Class`, `Class.field` or `Enum.MEMBER`, the class by its new name) to the old name
alone: of the class, the field or the member."""
