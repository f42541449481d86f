"""Who may ask: the keys that clients send, and what each is allowed."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

ANYONE = "anyone"
"""Who comes where no key is needed."""


@dataclass(frozen=True, slots=True)
class Key:
    """One that was given out, or that anyone may make up."""

    name: str = ANYONE
    profiles: tuple[str, ...] = ()
    """Those it may ask for by name; it gets the first where nothing names another."""
    policy: Mapping[str, Any] = field(default_factory=dict)
    """What narrows its profile."""


_ANYONE = Key()


class Keyring:
    """All keys that were given out; where there are none, everyone is let in."""

    def __init__(
        self,
        keys: Iterable[tuple[str, Key]] = (),
        *,
        is_closed: bool = False,
        operator: str | None = None,
    ) -> None:
        """Each with what clients must send. `is_closed`: where there are none, nobody is let in by
        them, for somebody else says who may come. `operator`: what the operator sends."""
        self._is_closed = is_closed
        self._keys = {_digest(secret): key for secret, key in keys}
        self._operator = None if operator is None else _digest(operator)

    @property
    def is_open(self) -> bool:
        """Whether anyone is let in."""
        return not self._keys and not self._is_closed

    @property
    def has_many(self) -> bool:
        """Return True if clients come with different keys."""
        return self._is_closed or len(self._keys) > 1

    def find(self, sent: str) -> Key | None:
        """Whose key that is."""
        # By digest: how long a comparison takes tells nothing of a key.
        return _ANYONE if self.is_open else self._keys.get(_digest(sent))

    def is_operator(self, sent: str) -> bool:
        """Return True for the operator's own key. Where there is none, everybody is the operator on
        an open server, and who has the only key on one with a single key."""
        if self._operator is not None:
            return _digest(sent) == self._operator
        return self.is_open or (len(self._keys) == 1 and self.find(sent) is not None)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
