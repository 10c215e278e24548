"""ASGI middleware that protects a server on the user's machine from web pages of other sites.

A page can send a form or plain text to any address without permission, and its host name may
resolve to this machine (DNS rebinding). A request is therefore served only if

- its `Host` names this machine: loopback, or a name that the server was configured with. If the
  server does not listen on loopback only, any IP address is accepted too, because names can be
  rebound but addresses cannot;
- its `Origin`, which browsers send with requests that may change state, is the server itself;
- its `Sec-Fetch-Site`, which browsers send with all other requests, does not report a different
  site, unless the user follows a link.

Clients other than browsers send neither of the last two headers.

Starlette's `TrustedHostMiddleware` compares names only: it knows no address ranges such as loopback,
takes the first of two `Host` headers, and looks at no `Origin`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, NamedTuple

from schemas.errors import InputError, RolloutError

if TYPE_CHECKING:  # the functions below are also for commands that serve nothing
    from starlette.types import ASGIApp, Receive, Scope, Send

    from pipelines.http_server import Refuse

_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}
_OWN_SITES = frozenset({"same-origin", "none"})
_POLICY_VIOLATION = 1008


class _Authority(NamedTuple):
    name: str
    port: int | None


class Guard:
    """ASGI application that forwards allowed requests to another application and rejects the rest.

    Args:
        app: The protected application.
        listens_on: Address or host name that the server listens on.
        refuse: Builds the response to a rejected request.
        allowed_hosts: Further host names of the server.

    Example:
        >>> app = Guard(app, "127.0.0.1", error_response, ["recorder.lan"])
    """

    def __init__(
        self,
        app: ASGIApp,
        listens_on: str,
        refuse: Refuse,
        allowed_hosts: Iterable[str] = (),
    ) -> None:
        self._app, self._refuse = app, refuse
        self._names = {"localhost", *map(_plain, [listens_on, *allowed_hosts])}
        self._is_local = is_loopback(listens_on)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request to the application, or reject it."""
        try:
            self.check(scope)
        except RolloutError as error:
            response = self._refuse(error, scope.get("path", ""))
            if scope["type"] == "http":
                await response(scope, receive, send)
            else:
                # ASGI: a websocket may be closed only after its connect event was received.
                await receive()
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await self._app(scope, receive, send)

    def check(self, scope: Scope) -> None:
        """Reject a request that comes from another site or is addressed to another host.

        Args:
            scope: ASGI scope of a request or a websocket.

        Raises:
            InputError: `one_host`: there is not exactly one `Host` header; `foreign_host`: the
                header names another host; `foreign_origin`: the request comes from another site.
        """
        where = scope["raw_path"].decode("latin-1").partition("?")[0]
        host = self._host(_values(scope, b"host"), where)
        for origin in _values(scope, b"origin"):
            if not _is_of(origin, host):
                finding = f"requests from the origin {origin!r} are not allowed"
                raise InputError("foreign_origin", where, finding)
        sites = set(_values(scope, b"sec-fetch-site")) - _OWN_SITES
        if sites and not _follows_link(scope):
            finding = f"requests from pages of other sites are not allowed ({min(sites)})"
            raise InputError("foreign_origin", where, finding)

    def _host(self, hosts: list[str], where: str) -> _Authority:
        if len(hosts) != 1:
            raise InputError("one_host", where, f"{len(hosts)} `Host` headers", "1")
        host = _authority(hosts[0])
        if host is None or not self._is_served(host.name):
            names = ", ".join(sorted(self._names))
            hint = "if it names this machine, start the server with --allow-host NAME"
            finding, expected = f"the host {hosts[0]!r}", f"one of {names}"
            raise InputError("foreign_host", where, finding, expected, hint)
        return host

    def _is_served(self, name: str) -> bool:
        if name in self._names:
            return True
        return _address(name) is not None and (is_loopback(name) or not self._is_local)


def is_loopback(host: str) -> bool:
    """True if a server that listens on this address is reachable only from this machine.

    Example:
        >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "[::1]", "0.0.0.0", "box")]
        [True, True, True, False, False]
    """
    address = _address(host)
    return _plain(host) == "localhost" if address is None else address.is_loopback


def is_host_name(text: str) -> bool:
    """True if the text is a host name or address without a port."""
    authority = _authority(text)
    return authority is not None and authority.port is None


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _authority(text: str) -> _Authority | None:
    """Parse an authority such as "localhost:8100"; None if it is malformed."""
    match = _AUTHORITY.fullmatch(text.lower())
    return match and _Authority(_plain(match[1]), None if match[2] is None else int(match[2]))


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    # ::ffff:127.0.0.1 is loopback too: compare the embedded IPv4 address.
    return mapped or address


def _is_of(origin: str, host: _Authority) -> bool:
    """True if the origin is the server that the request was addressed to."""
    scheme, _, rest = origin.lower().partition("://")
    found = _authority(rest)
    if scheme not in _PORTS or found is None:
        return False
    default = _PORTS[scheme]
    return (found.name, found.port or default) == (host.name, host.port or default)


def _follows_link(scope: Scope) -> bool:
    """True if the user navigates to a page, which has no side effects and leaks no data."""
    mode, dest = _values(scope, b"sec-fetch-mode"), _values(scope, b"sec-fetch-dest")
    return scope.get("method") == "GET" and (mode, dest) == (["navigate"], ["document"])
