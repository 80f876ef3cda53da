"""Server-sent events out of the bytes of a stream, at little cost per event.

Source: WHATWG HTML, server-sent events. Of the fields only `data` is kept; lines end in LF or CRLF
(a lone CR, which the standard allows and nobody sends, ends none).
"""

from __future__ import annotations

_MOST_BYTES = 16 << 20
"""Of an event that has not ended: more is no stream of events."""


class BadStream(ValueError):
    """These bytes are no stream of events."""


class EventReader:
    """Takes bytes as they come, in pieces of any size; gives the data of each event that ended."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes.

        Raises:
            BadStream: an event is longer than any could be.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _MOST_BYTES:
            raise BadStream(f"an event has more than {_MOST_BYTES:,} bytes")
        ended: list[bytes] = []
        for line in lines:
            plain = line[:-1] if line.endswith(b"\r") else line
            if plain.startswith(b"data:"):
                self._data.append(plain[6:] if plain[5:6] == b" " else plain[5:])
            elif not plain and self._data:
                ended.append(b"\n".join(self._data))
                self._data.clear()
        return [data for data in ended if data]

    def close(self) -> list[bytes]:
        """The data of a last event that no blank line ended, as some servers leave it."""
        return self.feed(b"\n\n")
