"""Event loops without threads."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


class _NoThreads(ThreadPoolExecutor):
    def submit(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("a thread was needed")


@contextmanager
def no_threads() -> Iterator[None]:
    """Make each use of the running loop's threads in the block fail."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(_NoThreads())
    try:
        yield
    finally:
        loop.set_default_executor(ThreadPoolExecutor())
