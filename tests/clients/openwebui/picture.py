"""A PNG image with a pattern that a broken decoder would not reproduce."""

import struct
import zlib

WIDTH, HEIGHT = 160, 100


def png() -> bytes:
    """Return an image that is blue on the left, red on the right and greener at the bottom."""
    rows = b"".join(
        b"\0" + b"".join(bytes((x, 2 * y, 160 - x)) for x in range(WIDTH)) for y in range(HEIGHT)
    )
    size = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", size), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
