"""Which of the operator's forward proxies a backend is reached through, if any.

`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` count, in either case, as `urllib` reads
them. Only calls to the backend ask here: what a request has fetched, and what a sandbox reaches,
never goes through a proxy of the environment. No credentials are taken from a netrc file.
"""

import os
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies_environment

from policies.hosts import is_public, parse_address

_SERVED = ("http", "https")
_PORTS = {"http": 80, "https": 443}


def proxy_for(url: str, proxies: Mapping[str, str] | None = None) -> str | None:
    """Return the URL of the proxy for a backend's URL, or None where it is reached directly.

    `proxies` are the environment's, by scheme, with "no" for the exceptions. A backend is exempt
    whose host is an address that is not public, `localhost` or below it, or a name without a dot.
    A longer name is not looked up: `NO_PROXY` exempts it. Raises ValueError for a proxy that
    cannot be used.
    """
    known = dict(getproxies_environment() if proxies is None else proxies)
    backend = urlsplit(url)
    found = known.get(backend.scheme) or known.get("all")
    if not found or is_exempt(url) or _is_listed(backend, known.get("no", "")):
        return None
    return _checked(found if "://" in found else f"http://{found}")


def is_exempt(url: str) -> bool:
    """Return whether a URL leads to this machine or its own network, as far as its text tells."""
    host = (urlsplit(url).hostname or "").removesuffix(".")
    if found := parse_address(host):
        return not is_public(found)
    return "." not in host or host.endswith(".localhost")


def proxy_urls() -> list[str]:
    """Return the URLs of all proxies that the environment names."""
    found = (value for scheme, value in getproxies_environment().items() if scheme != "no")
    return [value if "://" in value else f"http://{value}" for value in found]


def exempt_in_environment(url: str | None) -> None:
    """Add this machine, and a URL that is exempt, to the process's `no_proxy`.

    It is for a library that reads the environment itself.
    """
    own = ["localhost", "127.0.0.1", "::1"]
    if url and is_exempt(url) and (host := urlsplit(url).hostname):
        own.append(host)
    given = getproxies_environment().get("no", "")
    listed = [each.strip() for each in given.split(",") if each.strip()]
    if "*" not in listed:
        os.environ["no_proxy"] = ",".join(dict.fromkeys([*listed, *own]))


def _is_listed(backend: SplitResult, no_proxy: str) -> bool:
    """Return whether `NO_PROXY` names the backend: itself or a domain above it, with its port or
    without; `*` stands for all."""
    host = (backend.hostname or "").removesuffix(".")
    port = backend.port or _PORTS.get(backend.scheme, 80)
    for entry in (each.strip().lower().lstrip(".") for each in no_proxy.split(",")):
        if entry == "*":
            return True
        if entry and any(f".{name}".endswith(f".{entry}") for name in (host, f"{host}:{port}")):
            return True
    return False


def _checked(proxy: str) -> str:
    split = urlsplit(proxy)
    if split.scheme not in _SERVED:
        raise ValueError(
            f"the proxy that the environment names is a {split.scheme} proxy: http and https"
            " proxies are supported; set NO_PROXY to reach the backend directly"
        )
    try:
        has_host = bool(split.hostname) and split.port != 0
    except ValueError:
        has_host = False
    if not has_host:
        raise ValueError("the proxy that the environment names has no host and port")
    return proxy
