"""Says who may talk to the server of the live page, and refuses everybody else before a route is reached.

Loopback is shared by all users of a machine, and every web site that a user visits can send requests to it. So:

- a **session**: the address of the page has a token, which works once and becomes a cookie. The cookie is
  HttpOnly and SameSite=Strict; its value is random and only its digest is kept, in memory, for a week.
- a **viewer's** address has another token, for any number of browsers; their sessions can send no POST, and push
  out no session of those that can.
- a **folder** with a random name has all that the page asks for, and is the cookie's Path: cookies know no ports,
  and a server of another user on this machine would get this one's from whoever follows a link to it. The name is
  told to browsers that use a token, and to nobody else.
- the **Host** header must be one that this server is known by, port included: a name that an attacker has pointed
  here (DNS rebinding) is none.
- **Origin** and **Sec-Fetch-Site** must not be another site's: only the page itself asks for anything. A link from
  elsewhere may open the page, nothing else.
- **POST** needs JSON and the page's own origin, which no form of another site can send.
- what is served can run scripts only from files of this server, cannot be framed, and names no address elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
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
#: Sessions that are kept, the latest, and streams that one of them may have open.
MOST_SESSIONS, MOST_STREAMS = 64, 32
SESSION_S = 7 * 86400.0
SHORTEST_TOKEN = 16
SCRAPED = "/metrics"
VIEWER = "this browser has a viewer's address, which may look and not act"

LOG_IN = """<!doctype html><meta charset="utf-8"><title>ensemble</title>
<p>This page needs the address that <code>ensemble</code> printed where it was started; each works once, in one
browser. If this browser has opened it before, its history has the page itself, below <code>/p/</code>; if that led
here: <a href=".">open the page</a>.</p>
"""


@dataclass(eq=False)
class BrowserSession:
    """One browser that has used a token.

    Attributes:
        may_act: whether it may send requests to runs; a viewer's may not.
    """

    digest: bytes
    ends: float
    may_act: bool = True
    streams: int = 0

    @property
    def name(self) -> str:
        """What it is called in the log; nothing that opens it follows from that."""
        return hashlib.sha256(self.digest).hexdigest()[:8]


class Refused(Exception):
    """A request that is not served: its status, and why in one line."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class Guard:
    """Knows the tokens and sessions of one server, and checks requests.

    Args:
        hosts: values of the Host header that are this server's, in lower case.
        port: the server's, in the cookie's name, which tells it from those of other servers of this host.
        announce: receives the address with a new token.
        scraper_token: lets a scraper read /metrics; None: only with a session.
        announce_viewer: receives the address with the viewers' token; None: there is none.
        prefix: of the paths that browsers ask a proxy for, which takes it away; "/team/run".
        clock: seconds, by which sessions end.

    Attributes:
        root: path of the folder with the page, with the slash.
        shown_root: the same as browsers know it.
    """

    def __init__(
        self,
        hosts: Collection[str],
        port: int,
        url: str,
        announce: Callable[[str], object],
        scraper_token: str | None = None,
        announce_viewer: Callable[[str], object] | None = None,
        prefix: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = f"/p/{secrets.token_urlsafe(16)}/"
        self.shown_root = prefix + self.root
        self._clock = clock
        self.cookie = f"ensemble_{port}"
        self._hosts, self._url, self._announce = frozenset(hosts), url, announce
        self._scraper = None if scraper_token is None else _digest(scraper_token)
        self._sessions: dict[bool, list[BrowserSession]] = {True: [], False: []}  # by `may_act`
        self._token = self._make_token(announce)
        self._viewer_token = None if announce_viewer is None else self._make_token(announce_viewer)

    def _make_token(self, announce: Callable[[str], object]) -> bytes:
        token = secrets.token_urlsafe(32)
        announce(f"{self._url}?token={token}")
        return _digest(token)

    def redeem(self, token: str) -> str | None:
        """Returns the id of a new session for a token: one that has not been used, or the viewers'; else None."""
        given = _digest(token)
        may_act = hmac.compare_digest(given, self._token)
        if not may_act and (self._viewer_token is None or not hmac.compare_digest(given, self._viewer_token)):
            return None
        id = secrets.token_urlsafe(32)
        kept = self._sessions[may_act]
        kept.append(BrowserSession(_digest(id), self._clock() + SESSION_S, may_act))
        del kept[:-MOST_SESSIONS]
        if may_act:
            self._token = self._make_token(self._announce)
        return id

    def find_session(self, request: web.Request) -> BrowserSession | None:
        """The session that a request belongs to."""
        given = _digest(request.cookies.get(self.cookie, ""))
        found = None
        for session in (*self._sessions[True], *self._sessions[False]):
            if hmac.compare_digest(session.digest, given) and self.is_valid(session):
                found = session
        return found

    def is_valid(self, session: BrowserSession) -> bool:
        """Whether a session has not ended."""
        return self._clock() < session.ends

    def check(self, request: web.Request) -> BrowserSession | None:
        """Returns the session of a request that may be served; None for a request that needs none.

        Raises:
            Refused: it may not.
        """
        if request.method not in METHODS:
            raise Refused(405, "only GET, HEAD and POST are served here")
        if not request.raw_path.startswith("/"):
            raise Refused(400, "the address must begin with /")
        named = [value.lower() for value in request.headers.getall("Host", [])]
        if len(named) != 1 or named[0] not in self._hosts:
            known = ", ".join(sorted(self._hosts))
            raise Refused(403, f"this server is {known}; --allow-host NAME[:PORT] adds a name")
        self._check_origin(request, named[0])
        session = self.find_session(request)
        is_open = request.path == "/" and request.method == "GET" and "token" in request.query
        if session is None and not is_open and not self._may_scrape(request):
            raise Refused(401, "open the address that was printed where the page was started")
        if request.method == "POST" and session is not None and not session.may_act:
            raise Refused(403, VIEWER)
        return session

    def _check_origin(self, request: web.Request, host: str) -> None:
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
                request["session"] = self.check(request)
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
    for each in extra:
        name, colon, given = each.rpartition(":")
        pairs.add((name, int(given)) if colon and given.isdigit() and name[-1:] != ":" else (each, port))
    found = {f"{name}:{number}" for name, number in pairs}
    return {name.lower() for name in found | {name for name, number in pairs if number in (80, 443)}}


def read_token_file(path: str | os.PathLike[str]) -> str:
    """Returns the scraper's token from a file that only its owner, the user or root, may read.

    Raises:
        StoreError: there is none, it is another user's or others may read it, or it is too short.
    """
    file = Path(path)
    try:
        with open(file, "rb") as opened:
            found = os.fstat(opened.fileno())
            token = opened.read(4096).decode("ascii").strip() if stat.S_ISREG(found.st_mode) else ""
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "it is not ASCII text"
        raise StoreError(f"cannot read the token of {file}: {why}") from None
    if found.st_uid not in (os.geteuid(), 0):
        raise StoreError(f"{file} belongs to another user, who knows its token: write one of your own")
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StoreError(f"{file} can be read by others: `chmod 600 {file}`")
    if len(token) < SHORTEST_TOKEN:
        raise StoreError(f"the token of {file} must have at least {SHORTEST_TOKEN} characters")
    return token
