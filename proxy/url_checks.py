"""Checks the URLs of a request that its backend is about to fetch from inside the network."""

import asyncio
from collections.abc import Sequence

from policies.hosts import Target
from proxy.errors import BadRequestError
from proxy.fetch import Fetcher, FetchError, target_of

MAX_HOSTS = 32
"""The hosts and ports that the URLs of one request may name which the backend fetches."""
CHECKS_AT_ONCE = 4
"""As many as are looked up for one client at a time."""


async def check_urls(fetcher: Fetcher, urls: Sequence[str], owner: str) -> None:
    """Look each host and port up once. Raises BadRequestError for a private address, for a name
    that cannot be looked up, and for more than `MAX_HOSTS`."""
    at_once = asyncio.Semaphore(CHECKS_AT_ONCE)

    async def fault(url: str) -> FetchError | None:
        try:
            async with at_once:
                await fetcher.check(url, owner)
        except FetchError as error:
            return error
        return None

    by_target = _by_target(urls)
    if len(by_target) > MAX_HOSTS:
        raise BadRequestError(
            f"The request names URLs of more than {MAX_HOSTS} hosts, each of which is looked up"
            " before the backend is asked. Name fewer, or send the files as data URLs.",
            code="too_many_urls",
        )
    async with asyncio.TaskGroup() as group:
        checks = {url: group.create_task(fault(url)) for url in by_target.values()}
    for url, check in checks.items():
        if error := check.result():
            raise _not_allowed(url, error) from error


def _by_target(urls: Sequence[str]) -> dict[Target, str]:
    """Return one URL of each host and port. Raises BadRequestError."""
    found: dict[Target, str] = {}
    for url in urls:
        try:
            found.setdefault(target_of(url), url)
        except FetchError as error:
            raise _not_allowed(url, error) from error
    return found


def _not_allowed(url: str, error: FetchError) -> BadRequestError:
    return BadRequestError(
        f"Invalid URL {url[:200]!r}: the backend would fetch it from inside its network, and"
        f" {error}. The operator allows it with backend.fetches_urls.",
        code="url_not_allowed",
    )
