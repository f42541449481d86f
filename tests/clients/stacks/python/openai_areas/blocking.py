"""An async client of which every call is waited for, so that a story is told once for both."""

from collections.abc import AsyncIterable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from anyio.from_thread import BlockingPortal
from pydantic import BaseModel

END = object()


class Blocking:
    """Something of the SDK's whose work is done in the loop of a portal, and taken from there."""

    def __init__(self, portal: BlockingPortal, it: Any) -> None:
        self._portal = portal
        self.it = it

    def __getattr__(self, name: str) -> Any:
        return self._taken(getattr(self.it, name))

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._run(lambda: self.it(*args, **named))

    def __iter__(self) -> Iterator[Any]:
        found = aiter(self.it)
        return iter(lambda: self._run(lambda: anext(found, END)), END)

    def __enter__(self) -> Any:
        return self._run(self.it.__aenter__)

    def __exit__(self, *raised: Any) -> Any:
        return self._run(lambda: self.it.__aexit__(*raised))

    def beside(self, it: Any) -> "Blocking":
        """The same of something else."""
        return Blocking(self._portal, it)

    def _run(self, act: Callable[[], Any]) -> Any:
        return self._taken(self._portal.call(act))

    def _taken(self, found: Any) -> Any:
        """Values as they are; what has work to do as something to wait for."""
        works = isinstance(found, AsyncIterable | AbstractAsyncContextManager) or callable(found)
        of_the_sdk = type(found).__module__.startswith("openai")
        if works or (of_the_sdk and not isinstance(found, BaseModel)):
            return self.beside(found)
        return found
