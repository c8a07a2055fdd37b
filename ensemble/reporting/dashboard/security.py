"""Says who may talk to the server of the live page, and refuses everybody else before a route is reached.

Loopback is shared by all users of a machine, and every web site that a user visits can send requests to it.
Whoever opens the address with the token gets a cookie for a folder with a random name, which has the whole page.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Awaitable, Callable, Collection
from ipaddress import ip_address
from pathlib import Path

from aiohttp import web

from ensemble.reporting.dashboard.feed import encode
from ensemble.store.files import StoreError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self'; connect-src 'self'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Server": "ensemble",
}
METHODS = ("GET", "HEAD", "POST")
SHORTEST_TOKEN = 16
SCRAPED = "/metrics"

LOG_IN = """<!doctype html><meta charset="utf-8"><title>ensemble</title>
<p>Open the address that <code>ensemble</code> printed where it was started: it has the key. If this browser
has opened it before, its history has the page, below <code>/p/</code>; if that led here: <a href=".">open it</a>.
"""


class Refused(Exception):
    """A request that is not served: its status, and why in one line."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class Guard:
    """Knows the token and the cookie of one server, and checks requests.

    Cookies know no ports: a server of another user on this machine would get this one's from whoever follows a
    link to it. So the cookie's path is the folder, whose name only browsers with the token are told.

    Args:
        hosts: values of the Host header that are this server's, in lower case: a name that an attacker has pointed
            here (DNS rebinding) is none.
        port: the server's, in the cookie's name, which tells it from those of other servers of this host.
        scraper_token: lets a scraper read /metrics; None: only with the cookie.
        prefix: of the paths that browsers ask a proxy for, which takes it away; "/team/run".

    Attributes:
        url: the address with the token.
        root: path of the folder with the page, with the slash.  shown_root: the same as browsers know it.
        cookie: its name.
    """

    def __init__(
        self, hosts: Collection[str], port: int, url: str, scraper_token: str | None = None, prefix: str = ""
    ) -> None:
        token = secrets.token_urlsafe(32)
        self.url = f"{url}?token={token}"
        self.root = f"/p/{secrets.token_urlsafe(16)}/"
        self.shown_root, self.cookie = prefix + self.root, f"ensemble_{port}"
        self._hosts, self._token, self._session = frozenset(hosts), _digest(token), secrets.token_urlsafe(32)
        self._scraper = None if scraper_token is None else _digest(scraper_token)

    def redeem(self, token: str) -> str | None:
        """Returns the cookie's value for the token; None for another one."""
        return self._session if hmac.compare_digest(_digest(token), self._token) else None

    def check(self, request: web.Request) -> None:
        """Checks that a request may be served.

        Raises:
            Refused: it may not.
        """
        if request.method not in METHODS:
            raise Refused(405, "only GET, HEAD and POST are served here")
        if not request.raw_path.startswith("/"):
            raise Refused(400, "the address must begin with /")
        named = [value.lower() for value in request.headers.getall("Host", [])]
        if len(named) != 1 or named[0] not in self._hosts:
            own_hosts = ", ".join(sorted(self._hosts))
            raise Refused(403, f"this server is {own_hosts}; --allow-host NAME[:PORT] adds a name")
        self._check_origin(request, named[0])
        is_login = request.path == "/" and request.method == "GET" and "token" in request.query
        has_cookie = hmac.compare_digest(_digest(request.cookies.get(self.cookie, "")), _digest(self._session))
        if not (has_cookie or is_login or self._may_scrape(request)):
            raise Refused(401, "open the address that was printed where the page was started")

    def _check_origin(self, request: web.Request, host: str) -> None:
        """Checks that the page itself asks; a link from elsewhere may open the page, nothing else."""
        origins = request.headers.getall("Origin", [])
        own = [origin.lower() in (f"http://{host}", f"https://{host}") for origin in origins]
        sites = request.headers.getall("Sec-Fetch-Site", [])
        if not all(own) or len(own) > 1:
            raise Refused(403, "requests of other sites are not served")
        is_link = (
            (request.method, request.headers.get("Sec-Fetch-Mode")) == ("GET", "navigate")
            and request.path in ("/", self.root)
            and request.headers.get("Sec-Fetch-Dest") == "document"
            and not origins
        )
        if any(site not in ("same-origin", "none") for site in sites) and not is_link:
            raise Refused(403, "requests of other sites are not served")
        if request.method != "POST":
            return
        if not own and sites != ["same-origin"]:
            raise Refused(403, "a request that changes something must come from the page")
        if request.content_type != "application/json" or "Content-Encoding" in request.headers:
            raise Refused(415, "the body must be application/json")

    def _may_scrape(self, request: web.Request) -> bool:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if request.path != SCRAPED or request.method == "POST" or self._scraper is None:
            return False
        return kind.lower() == "bearer" and hmac.compare_digest(_digest(token.strip()), self._scraper)

    def add_to(self, app: web.Application) -> None:
        """Has an application serve only what passes `check`, with headers that bind the browser."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                self.check(request)
                return await handler(request)
            except Refused as error:
                return refuse(request, error.status, error.why)
            except web.HTTPException as error:
                return refuse(request, error.status, error.reason)
            except ConnectionError:
                raise
            except Exception:
                log.exception("%s %r failed", request.method, request.path)
                return refuse(request, 500, "the server has an error; its output says which")

        async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
            for name, value in HEADERS.items():
                response.headers[name] = value
            response.headers.setdefault("Cache-Control", "no-store")

        app.middlewares.append(guard)
        app.on_response_prepare.append(add_headers)


def refuse(request: web.Request, status: int, why: str) -> web.Response:
    """Returns a response that says in one line why a request is not served, and closes the connection."""
    if request.path.endswith("/") and status == 401:
        answer = web.Response(status=status, text=LOG_IN, content_type="text/html")
    else:
        answer = web.Response(status=status, body=encode({"error": why}), content_type="application/json")
    if status == 405:
        answer.headers["Allow"] = ", ".join(METHODS)
    if request.can_read_body or status >= 400:
        answer.force_close()
    return answer


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an IP address."""
    return ip_address(address).is_loopback


def allowed_hosts(address: str, port: int, own: Collection[str], extra: Collection[str] = ()) -> set[str]:
    """Returns the values of the Host header by which a server is known, in lower case.

    Args:
        address: the IP address that it is bound to.
        own: names and IP addresses of this machine, for a server that others can reach.
        extra: more names, each with the port by which browsers reach it, else the server's.
    """
    bound = ip_address(address)
    if bound.is_unspecified:
        names = {"localhost", "127.0.0.1", "::1", *own}
    else:
        names = {address, *({"localhost"} if bound.is_loopback else own)}
    pairs = {(f"[{name}]" if ":" in name else name, port) for name in names}
    for host in extra:
        name, colon, number = host.rpartition(":")
        pairs.add((name, int(number)) if colon and number.isdigit() and name[-1:] != ":" else (host, port))
    hosts = {f"{name}:{number}" for name, number in pairs}
    return {name.lower() for name in hosts | {name for name, number in pairs if number in (80, 443)}}


def read_token_file(path: str | os.PathLike[str]) -> str:
    """Returns the scraper's token from a file that only its owner, the user or root, may read.

    Raises:
        StoreError: there is none, it is another user's or others may read it, or it is too short.
    """
    file = Path(path)
    try:
        with open(file, "rb") as opened:
            status = os.fstat(opened.fileno())
            token = opened.read(4096).decode("ascii").strip() if stat.S_ISREG(status.st_mode) else ""
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "it is not ASCII text"
        raise StoreError(f"cannot read the token of {file}: {why}") from None
    if status.st_uid not in (os.geteuid(), 0):
        raise StoreError(f"{file} belongs to another user, who knows its token: write one of your own")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StoreError(f"{file} can be read by others: `chmod 600 {file}`")
    if len(token) < SHORTEST_TOKEN:
        raise StoreError(f"the token of {file} must have at least {SHORTEST_TOKEN} characters")
    return token
