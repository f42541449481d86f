"""Links that open without a key, for a while."""

import hashlib
import hmac
import secrets
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MAX_EXPIRY_DIGITS = 12


class Signer:
    """Signs links and knows them again, also after a restart."""

    def __init__(self, key: Path, now: Callable[[], float]) -> None:
        self._key = _kept(key)
        self._now = now

    def sign(self, container_id: str, file_id: str, expires: int) -> str:
        """The proof that a link was made here."""
        text = f"{container_id}/{file_id}/{expires}".encode()
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()

    def is_signed(self, container_id: str, file_id: str, expires: str, signature: str) -> bool:
        """Whether a link was made here and still holds."""
        if not (expires.isascii() and expires.isdigit() and len(expires) <= MAX_EXPIRY_DIGITS):
            return False
        if int(expires) < self._now():
            return False
        expected = self.sign(container_id, file_id, int(expires))
        return hmac.compare_digest(expected.encode(), signature.encode())


def _kept(path: Path) -> bytes:
    """The key in the file, made where there is none."""
    if not path.exists():
        # Whole or not at all: several proxies may start at once.
        whole = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        whole.touch(mode=0o600)
        whole.write_bytes(secrets.token_bytes(32))
        with suppress(FileExistsError):
            path.hardlink_to(whole)
        whole.unlink()
    return path.read_bytes()
