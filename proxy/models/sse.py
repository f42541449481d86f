"""Server-sent events, decoded as the bytes arrive."""

MAX_EVENT_BYTES = 32 << 20


class EventTooLongError(Exception):
    """An event has more than `MAX_EVENT_BYTES`."""


class SSEDecoder:
    """Turns bytes, split at any place, into the `data` of each event. Raises EventTooLongError."""

    def __init__(self) -> None:
        self._unfinished_line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        """Of the lines that `_data` has the values of."""

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that these bytes complete."""
        if self._data_bytes + len(self._unfinished_line) + len(piece) > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event is longer than {MAX_EVENT_BYTES >> 20} MiB")
        head, newline, tail = piece.rpartition(b"\n")
        if not newline:
            self._unfinished_line += tail
            return []
        if self._unfinished_line:
            head = bytes(self._unfinished_line) + head
            self._unfinished_line.clear()
        if tail:
            self._unfinished_line += tail
        lines = head.split(b"\n")
        return [event for line in lines if (event := self._event_ended_by(line)) is not None]

    def flush(self) -> list[bytes]:
        """The event that the end of the stream completes: some servers omit the last empty line.
        A line without its end is a cut one and means nothing."""
        event = self._event_ended_by(b"")
        return [] if event is None else [event]

    def _event_ended_by(self, line: bytes) -> bytes | None:
        line = line.removesuffix(b"\r")
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
                self._data_bytes += len(line) + 1
            return None
        if not self._data:
            return None
        event = b"\n".join(self._data)
        self._data, self._data_bytes = [], 0
        return event
