"""Server-sent events out of the bytes of a stream, at little cost per event.

Source: WHATWG HTML, server-sent events. Of the fields only `data` is kept; lines end in LF or CRLF
(a lone CR, which the standard allows and nobody sends, ends none).
"""

from __future__ import annotations

_MAX_EVENT_BYTES = 16 << 20
"""Of an event that has not ended: more is no stream of events."""


class StreamInvalid(ValueError):
    """These bytes are no stream of events."""


class EventReader:
    """Takes bytes as they come, in pieces of any size; gives the data of each event that ended."""

    def __init__(self) -> None:
        self._partial_line = b""
        self._data_lines: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes.

        Raises:
            StreamInvalid: an event is longer than any could be.
        """
        *lines, self._partial_line = (self._partial_line + piece).split(b"\n")
        if len(self._partial_line) > _MAX_EVENT_BYTES:
            raise StreamInvalid(f"an event has more than {_MAX_EVENT_BYTES:,} bytes")
        events: list[bytes] = []
        for line in lines:
            stripped = line[:-1] if line.endswith(b"\r") else line
            if stripped.startswith(b"data:"):
                self._data_lines.append(stripped[6:] if stripped[5:6] == b" " else stripped[5:])
            elif not stripped and self._data_lines:
                events.append(b"\n".join(self._data_lines))
                self._data_lines.clear()
        return [data for data in events if data]

    def close(self) -> list[bytes]:
        """The data of a last event that no blank line ended, as some servers leave it."""
        return self.feed(b"\n\n")
