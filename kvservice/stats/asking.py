"""Asks a node over HTTP, for command lines. For what is on this machine no proxy of the environment is asked."""

import ipaddress
import urllib.parse
import urllib.request
from typing import Any


def is_loopback(host: str) -> bool:
    """True for ``localhost`` and addresses of this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def open_url(url: str, timeout_s: float) -> Any:
    """The reply, a context manager. Raises as ``urllib.request.urlopen``."""
    direct = [urllib.request.ProxyHandler({})] if is_loopback(urllib.parse.urlsplit(url).hostname or "") else []
    return urllib.request.build_opener(*direct).open(url, timeout=timeout_s)
