"""A blocking wrapper of the async client, so that one test covers the sync and the async SDK."""

from collections.abc import AsyncIterable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from anyio.from_thread import BlockingPortal
from pydantic import BaseModel

END = object()


class Blocking:
    """An SDK object whose coroutines run in a portal's event loop."""

    def __init__(self, portal: BlockingPortal, it: Any) -> None:
        self._portal = portal
        self.it = it

    def __getattr__(self, name: str) -> Any:
        return self._wrapped(getattr(self.it, name))

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._run(lambda: self.it(*args, **named))

    def __iter__(self) -> Iterator[Any]:
        found = aiter(self.it)
        return iter(lambda: self._run(lambda: anext(found, END)), END)

    def __enter__(self) -> Any:
        return self._run(self.it.__aenter__)

    def __exit__(self, *raised: Any) -> Any:
        return self._run(lambda: self.it.__aexit__(*raised))

    def wrap(self, it: Any) -> "Blocking":
        """Wrap another object with the same portal."""
        return Blocking(self._portal, it)

    def _run(self, act: Callable[[], Any]) -> Any:
        return self._wrapped(self._portal.call(act))

    def _wrapped(self, found: Any) -> Any:
        """Return plain values unchanged and wrap SDK objects that still have work to do."""
        works = isinstance(found, AsyncIterable | AbstractAsyncContextManager) or callable(found)
        of_the_sdk = type(found).__module__.startswith("openai")
        if works or (of_the_sdk and not isinstance(found, BaseModel)):
            return self.wrap(found)
        return found
