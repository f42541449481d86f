"""Selects the operator's forward proxy for calls to a backend, if there is one.

`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` are read from the environment, in upper or
lower case, as `urllib` reads them. The variables apply only to calls to the backend, not to URLs in
requests and not to the egress of sandboxes. Credentials in a netrc file are not used.
"""

import os
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies_environment

from policies.hosts import is_public, parse_address

_SUPPORTED_SCHEMES = ("http", "https")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def proxy_for(url: str, proxies: Mapping[str, str] | None = None) -> str | None:
    """Return the URL of the proxy for a backend's URL, or None for a direct connection.

    `proxies` are the proxy URLs by scheme, with the value of `NO_PROXY` as "no"; the default is the
    environment's proxies. Connections to a host that `is_exempt` accepts, or that `NO_PROXY` lists,
    are direct. Raises ValueError for an unsupported or invalid proxy URL.
    """
    proxies = dict(getproxies_environment() if proxies is None else proxies)
    backend = urlsplit(url)
    proxy = proxies.get(backend.scheme) or proxies.get("all")
    if not proxy or is_exempt(url) or _is_listed(backend, proxies.get("no", "")):
        return None
    return _check_proxy_url(proxy if "://" in proxy else f"http://{proxy}")


def is_exempt(url: str) -> bool:
    """Return True if the host of a URL is a non-public address, `localhost`, a name under
    `localhost`, or a name without a dot. Names are not resolved: the operator lists other internal
    hosts in `NO_PROXY`."""
    host = (urlsplit(url).hostname or "").removesuffix(".")
    if ip := parse_address(host):
        return not is_public(ip)
    return "." not in host or host.endswith(".localhost")


def proxy_urls() -> list[str]:
    """Return the URLs of all proxies that the environment names."""
    urls = (url for scheme, url in getproxies_environment().items() if scheme != "no")
    return [url if "://" in url else f"http://{url}" for url in urls]


def add_to_no_proxy(url: str | None) -> None:
    """Add this machine, and the host of `url` if it is exempt, to the environment's `no_proxy`.

    litellm reads the environment itself.
    """
    exempt = ["localhost", "127.0.0.1", "::1"]
    if url and is_exempt(url) and (host := urlsplit(url).hostname):
        exempt.append(host)
    entries = [entry.strip() for entry in getproxies_environment().get("no", "").split(",")]
    listed = [entry for entry in entries if entry]
    if "*" not in listed:
        os.environ["no_proxy"] = ",".join(dict.fromkeys([*listed, *exempt]))


def _is_listed(backend: SplitResult, no_proxy: str) -> bool:
    """Return True if `NO_PROXY` contains the backend's host or a parent domain, with or without the
    port, or `*`."""
    host = (backend.hostname or "").removesuffix(".")
    port = backend.port or _DEFAULT_PORTS.get(backend.scheme, 80)
    for entry in (item.strip().lower().lstrip(".") for item in no_proxy.split(",")):
        if entry == "*":
            return True
        if entry and any(f".{name}".endswith(f".{entry}") for name in (host, f"{host}:{port}")):
            return True
    return False


def _check_proxy_url(proxy: str) -> str:
    split = urlsplit(proxy)
    if split.scheme not in _SUPPORTED_SCHEMES:
        raise ValueError(
            f"the proxy that the environment names is a {split.scheme} proxy: http and https"
            " proxies are supported; set NO_PROXY to reach the backend directly"
        )
    try:
        has_host = bool(split.hostname) and split.port != 0
    except ValueError:
        has_host = False
    if not has_host:
        raise ValueError(
            "the URL of the proxy that the environment names has no host, or an invalid port"
        )
    return proxy
