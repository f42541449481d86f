"""The end of what an agent writes to its standard error: open this to see what becomes of it."""

from sandbox_runtime.protocol import ProtocolError

TAIL_BYTES = 4096
MAX_STDERR_BYTES = 1 << 20
"""Of one agent in all its life: it writes there before it dies."""


class StderrTail:
    """What is kept of an agent's standard error, for error messages."""

    def __init__(self) -> None:
        self._tail = b""
        self._left = MAX_STDERR_BYTES

    def add(self, data: bytes | bytearray) -> None:
        """Keep the end. Raises ProtocolError beyond MAX_STDERR_BYTES."""
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        self._left -= len(data)
        if self._left < 0:
            raise ProtocolError(f"more than {MAX_STDERR_BYTES} bytes of diagnostics")

    def text(self) -> str:
        """Return it, without space at its ends."""
        return self._tail.decode(errors="replace").strip()
