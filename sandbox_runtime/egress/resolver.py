"""Names to addresses, by the host's own resolver."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

_THREADS = 32

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""The addresses of a name, best first. Raises OSError."""


class SystemResolver:
    """getaddrinfo, on threads of its own: a hostile name may hold one for half a minute, and the
    rest of the proxy works with the loop's."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="resolver")

    async def __call__(self, host: str) -> Sequence[str]:
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        )
        return [str(address[0]) for *_, address in found]

    def close(self) -> None:
        """Give the threads back. Safe to call twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
