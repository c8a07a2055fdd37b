"""Attacks on the live page, a real server over real sockets: what is refused, and that nothing has happened."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import run_events
from dashboard_process import HANG_S, Messages, Server, serve
from event_dicts import lines
from leftovers import wait_until

from ensemble.reporting.dashboard import connections
from ensemble.reporting.dashboard.security import allowed_hosts, read_token_file
from ensemble.store import StoreError

SECRET = "a file that nobody is shown"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in progress, which takes requests, beside a secret."""
    folder = tmp_path_factory.mktemp("attacked")
    run = run_events.write_run(folder / "run", run_events.list_run(until=20.0))
    (run / "requests").mkdir()
    (folder / "secret.txt").write_text(SECRET)
    return run


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    with serve(run) as server:
        yield server


@pytest.fixture(autouse=True)
def unharmed(run: Path, server: Server) -> Iterator[None]:
    """After each attack no request was written, and the server answers its user."""
    yield
    assert list((run / "requests").iterdir()) == []
    assert server.get("/api/runs")[0]["name"] == "digits"
    assert server.process.poll() is None


def refused(answer: tuple[int, dict[str, str], bytes], status: int) -> None:
    """The status, that no secret is told, and the headers that every answer has."""
    assert answer[0] == status, answer
    _, headers, body = answer
    assert SECRET.encode() not in body and b"member-0" not in body and "set-cookie" not in headers
    assert headers["x-content-type-options"] == "nosniff"
    assert "script-src 'self';" in headers["content-security-policy"]


# --- who asks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", ["/", "/static/app.js", "/api/runs", "/api/runs/events", "/metrics", "/nothing"]
)
def test_nothing_is_served_without_a_session(target: str, server: Server) -> None:
    for at_root in (True, False):
        refused(server.ask(target, cookie="", at_root=at_root), 401)


def test_a_token_works_once_and_its_cookie_can_be_read_by_no_script_and_goes_to_no_other_site(run: Path) -> None:
    with serve(run, log_in=False) as server:
        target = server.url[server.url.index("/?") :]
        refused(server.ask(target, "HEAD", cookie="", at_root=True), 401)  # a preview of a link uses up nothing
        first = server.log_in()
        assert server.get("/api/runs")
        refused(server.ask(target, cookie="", at_root=True), 401)
        assert server.url[server.url.index("/?") :] != target
        _, headers, _ = server.ask(server.url[server.url.index("/?") :], cookie="", at_root=True)
        second, *attributes = headers["set-cookie"].split("; ")
        assert second.startswith(f"ensemble_{server.port}=") and len(second) > 50 and first != second
        assert sorted(attributes) == ["HttpOnly", f"Path={headers['location']}", "SameSite=Strict"]
        assert all(server.ask("/api/runs", cookie=cookie)[0] == 200 for cookie in (first, second))


@pytest.mark.parametrize("token", ["", "wrong", "%00", "\xe9".encode().decode("latin-1"), "a" * 5000])
def test_a_wrong_token_is_no_session(token: str, server: Server) -> None:
    refused(server.ask(f"/?token={token}".encode("ascii", "ignore").decode(), cookie="", at_root=True), 401)


def test_a_cookie_of_another_port_and_a_forged_one_are_no_session(run: Path, server: Server) -> None:
    name, _, value = server.cookie.partition("=")
    with serve(run) as other:
        refused(other.ask("/api/runs", cookie=f"ensemble_{other.port}={value}"), 401)
        refused(other.ask("/api/runs", cookie=server.cookie), 401)
    for forged in (f"{name}={value[:-1]}", f"{name}=", f"{name}={value}x", f"ensemble={value}", "ünsinn"):
        refused(server.ask("/api/runs", cookie=forged.encode("ascii", "ignore").decode()), 401)


# --- DNS rebinding and other sites ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil:{port}", "127.0.0.1:{port}.", None, ""],
)
def test_a_name_that_is_not_this_servers_is_refused(host: str | None, server: Server) -> None:
    answer = server.ask("/api/runs", Host=host and host.format(port=server.port))
    assert answer[0] in (400, 403)
    assert b"digits" not in answer[2]


def test_the_names_of_loopback_are_this_servers(server: Server) -> None:
    for host in (f"LOCALHOST:{server.port}", f"127.0.0.1:{server.port}"):
        assert server.ask("/api/runs", Host=host)[0] == 200


def test_two_host_headers_and_an_absolute_address_are_refused(server: Server) -> None:
    head = f"Host: {server.host}\r\nCookie: {server.cookie}\r\n"
    for request in (
        f"GET {server.root}/api/runs HTTP/1.1\r\n{head}Host: evil.example\r\n\r\n",
        f"GET http://evil.example{server.root}/api/runs HTTP/1.1\r\n{head}\r\n",
        f"GET {server.root}/api/runs HTTP/1.0\r\nCookie: {server.cookie}\r\n\r\n",
    ):
        answer = server.send(request.encode())
        assert answer.split()[1] in (b"400", b"403"), answer
        assert b"digits" not in answer


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://localhost"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"},
    ],
)
def test_what_another_site_asks_for_is_refused(headers: dict[str, str], server: Server) -> None:
    refused(server.ask("/api/runs", **headers), 403)


def test_a_link_from_elsewhere_opens_the_page_and_nothing_embeds_it(server: Server) -> None:
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert server.ask("/", **link, Sec_Fetch_Dest="document")[0] in (200, 404)  # 404: before there is a page
    refused(server.ask("/", **link, Sec_Fetch_Dest="iframe"), 403)
    refused(server.ask("/", **link, Sec_Fetch_Dest="document", cookie=""), 401)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"Origin": None}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "https://evil.example", "Sec_Fetch_Site": "same-origin"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content_Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content_Type": None}, 415),
        ({"Content_Encoding": "gzip"}, 415),
        ({"Cookie": "ensemble_1=x"}, 401),
    ],
)
def test_a_request_forged_by_another_site_stops_no_run(
    changes: dict[str, str | None], status: int, server: Server
) -> None:
    target = f"/api/runs/{server.key}/actions"
    cookie = changes.pop("Cookie", None)
    refused(server.ask(target, "POST", {"verb": "stop"}, cookie=cookie, **changes), status)


# --- methods, addresses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "PUT", "DELETE", "PATCH", "CONNECT", "PROPFIND"])
def test_other_methods_are_refused(method: str, server: Server) -> None:
    for target in ("/", f"/api/runs/{server.key}/actions"):
        answer = server.ask(target, method)
        assert answer[0] in (400, 405) and b"digits" not in answer[2]
        assert "access-control-allow-origin" not in answer[1]


def test_head_sends_no_body_and_opens_no_stream(server: Server) -> None:
    status, headers, body = server.ask("/api/runs", "HEAD")
    assert (status, body) == (200, b"") and int(headers["content-length"]) > 10
    assert server.ask("/api/runs/events", "HEAD")[0] == 405
    assert server.ask(f"/api/runs/{server.key}/actions", "HEAD")[0] == 405
    assert server.ask(f"/api/runs/{server.key}/actions")[0] == 405


TRAVERSALS = [
    "../../secret.txt",
    "..%2f..%2fsecret.txt",
    "%2e%2e/%2e%2e/secret.txt",
    "%252e%252e%252fsecret.txt",
    "..%5c..%5csecret.txt",
    "....//....//secret.txt",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "app.js%00.png",
    ".",
    "..",
    "",
    "../dashboard/feed.py",
    "%2e%2e/feed.py",
    "__init__.py/../../feed.py",
    "~root",
    "file:///etc/passwd",
    "a" * 4000,
]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_file_outside_the_served_folders_is_read(path: str, server: Server, run: Path) -> None:
    head = f"Host: {server.host}\r\nCookie: {server.cookie}\r\nConnection: close\r\n\r\n"
    for prefix in ("/static/", f"/api/runs/{server.key}/members/", "/api/runs/", "/"):
        suffix = "/log" if "members" in prefix else ""
        answer = server.send(f"GET {server.root}{prefix}{path}{suffix} HTTP/1.1\r\n{head}".encode())
        assert answer.split()[1] in (b"400", b"404", b"200", b"405"), answer
        for told in (SECRET.encode(), b"root:", b"import annotations"):
            assert told not in answer, answer
        if answer.split()[1] == b"200":
            assert (prefix, path) in {("/api/runs/", "."), ("/", ""), ("/", "."), ("/api/runs/", "")}


def test_symbolic_links_in_a_run_lead_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "member-0").mkdir(parents=True)
    (outside / "member-0" / "log.txt").write_text(SECRET)
    events = run_events.list_run(until=20.0)
    linked, replaced = (run_events.write_run(tmp_path / name, events) for name in ("linked", "replaced"))
    members = linked / "members"
    for member in ("member-1", "member-2"):
        (members / member).mkdir(parents=True)
    (members / "member-0").symlink_to(outside / "member-0")
    (members / "member-1" / "log.txt").symlink_to(outside / "member-0" / "log.txt")
    (members / "member-2" / "log.txt").write_text("its own\n")
    (replaced / "members").symlink_to(outside)
    with serve(tmp_path) as server, contextlib.ExitStack() as stack:

        def follow(run: Path, member: str) -> Messages:
            (key,) = (row["key"] for row in server.get("/api/runs") if row["dir"] == str(run))
            return stack.enter_context(server.stream(f"/api/runs/{key}/members/{member}/log"))

        secret = [follow(linked, "member-0"), follow(linked, "member-1"), follow(replaced, "member-0")]
        assert follow(linked, "member-2").next()[2]["text"] == "its own\n", "what is no link is read"
        server.process.terminate()
        assert [messages.next()[0] for messages in secret] == ["end"] * 3


# --- what takes too much, or too long ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 10_000_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 10_000_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"a" * 990) for n in range(10_000)) + b"\r\n",
        b"a" * 10_000_000,
        b"\x16\x03\x01" + b"\0" * 1000,
    ],
    ids=["field", "address", "fields", "nothing", "TLS"],
)
def test_huge_heads_are_refused_before_they_are_read(head: bytes, server: Server) -> None:
    before = rss(server)
    answer = server.send(head, end=True)
    assert answer == b"" or answer.split()[1] in (b"400", b"431"), answer[:200]
    assert rss(server) - before < 5e6


def rss(server: Server) -> float:
    import psutil

    return float(psutil.Process(server.process.pid).memory_info().rss)


def test_a_body_that_is_too_large_or_does_not_come_is_refused(server: Server) -> None:
    target = f"/api/runs/{server.key}/actions"
    body = json.dumps({"verb": "stop", "at_once": True}) + " " * 2**17
    headers = {"Content_Type": "application/json", "Origin": f"http://{server.host}"}
    refused(server.ask(target, "POST", body, **headers), 413)
    head = f"POST {server.root}{target} HTTP/1.1\r\nHost: {server.host}\r\nCookie: {server.cookie}\r\n"
    head += f"Origin: http://{server.host}\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    answer = server.send(head.encode() + b'{"verb":"stop"')
    assert answer.split()[1] == b"408", answer


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: 15\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 15\r\n\r\n0\r\n\r\n",
        "Content-Length: 0\r\nContent-Length: 15\r\n\r\n",
        "Content-Length: +15\r\n\r\n",
        "Content-Length: 1_5\r\n\r\n",
        "Content-Length: -1\r\n\r\n",
        "Content-Length : 15\r\n\r\n",
        "Transfer-Encoding: xchunked\r\n\r\n",
        "Transfer-Encoding: chunked, identity\r\n\r\n",
        "Transfer-Encoding\x0b: chunked\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n-5\r\n",
        "Transfer-Encoding: chunked\r\n\r\n0x5\r\nabcde\r\n0\r\n\r\n",
        "X: a\r\n b: folded\r\n\x00\r\n\r\n",
        "X: a\nTransfer-Encoding: chunked\n\n",
    ],
)
def test_a_body_of_doubtful_length_hides_no_second_request(framing: str, server: Server) -> None:
    """The hidden request would be carried out if the first one's body were taken to be shorter than it is."""
    target, body = f"/api/runs/{server.key}/actions", '{"verb":"stop"}'
    own = f"Host: {server.host}\r\nCookie: {server.cookie}\r\nOrigin: http://{server.host}\r\n"
    own += "Content-Type: application/json\r\n"
    hidden = f"POST {server.root}{target} HTTP/1.1\r\n{own}Content-Length: {len(body)}\r\n\r\n{body}"
    answer = server.send(
        f"POST {server.root}{target} HTTP/1.1\r\n{own}{framing}{hidden}".encode("latin-1"), end=True
    )
    assert b" 202 " not in answer, answer
    assert answer.count(b"HTTP/1.1 ") <= 1, answer


@pytest.fixture
def idle(server: Server) -> Iterator[list[socket.socket]]:
    """A thousand connections that say nothing, or trickle."""
    found: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for n in range(1000):
            found.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), HANG_S)))
            if n % 2:
                found[-1].send(b"GET / HTTP/1.1\r\nHost: x\r\nX-")
        yield found


@pytest.mark.slow  # it measures time
def test_a_thousand_idle_connections_keep_nobody_waiting(idle: list[socket.socket], server: Server) -> None:
    took = []
    for _ in range(10):
        began = time.monotonic()
        assert server.get("/api/runs")
        took.append(time.monotonic() - began)
    assert sorted(took)[5] < 1.0, took
    assert open_connections(server) <= connections.MOST_CONNECTIONS + 5


def open_connections(server: Server) -> int:
    import psutil

    found = psutil.Process(server.process.pid).net_connections("tcp")
    return sum(each.status == "ESTABLISHED" for each in found)


def test_a_connection_that_trickles_is_closed_however_alive_it_seems(server: Server) -> None:
    sent, until = 0, time.monotonic() + HANG_S
    with socket.create_connection(("127.0.0.1", server.port), 0.5) as slow, contextlib.suppress(ConnectionError):
        slow.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        while time.monotonic() < until:
            slow.sendall(b"X-%d: y\r\n" % sent)
            sent += 1
            with contextlib.suppress(TimeoutError):
                if slow.recv(100) == b"":
                    break
    assert time.monotonic() < until, "it was never closed"
    assert sent > 5


@pytest.mark.more
def test_the_streams_of_a_session_are_bounded(run: Path) -> None:
    with serve(run) as server, contextlib.ExitStack() as stack:
        for _ in range(32):
            stack.enter_context(server.stream("/api/runs/events"))
        assert server.ask("/api/runs/events")[0] == 429
        assert server.get("/api/runs"), "documents are served meanwhile"
        stack.pop_all().close()
        wait_until(lambda: can_stream(server), "streams that were closed are not counted")


def can_stream(server: Server) -> bool:
    try:
        with server.stream("/api/runs/events") as messages:
            return messages.next()[0] is None
    except AssertionError:
        return False


# --- what runs say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [200, pytest.param(10**5, marks=pytest.mark.slow)])
def test_members_with_hostile_names(many: int, tmp_path: Path) -> None:
    bad = [
        "</script><script>alert(1)</script>",
        "../../../etc/passwd",
        "\u2028\u202egnp.exe",
        "a\nid: 1\ndata: {}\n\n",
        "\x00\x1b[2J",
        "\ud800",
        "<img src=x onerror=alert(1)>",
        "__proto__",
        "=cmd|' /C calc'!A0",
        "%s%n{0}${7*7}",
    ]
    log = run_events.Log()
    run_events.run_started(log, bad[0], "list", 3, many)
    for n in range(many):
        name = bad[n % len(bad)] + str(n)
        log.add(0.2, "member", **run_events.identity(n, {"lr": 0.1, bad[n % 3]: bad[n % 7]}, 3) | {"member": name})
    run = run_events.write_run(tmp_path / "run", log.events())
    with serve(run) as server:
        state = server.get(f"/api/runs/{server.key}/state")
        assert len(state["members"]["rows"]) == many and state["run"]["name"] == bad[0]
        assert server.get(f"/api/runs/{server.key}/curves")
        assert server.get("/api/runs")[0]["name"] == bad[0]
        with server.stream(f"/api/runs/{server.key}/events?from={state['offset']}&log={state['log']}") as messages:
            with (run / "events.jsonl").open("ab") as file:
                failed = {
                    "v": 2,
                    "t": run_events.START + 9,
                    "type": "failed",
                    "member": bad[3] + "3",
                    "attempt": 0,
                }
                file.write(lines([failed | {"error": bad[3], "reason": bad[0], "retry": False}]))
            event, id, change = messages.next()
            assert (event, id) == (None, change["offset"]) and list(change["members"]) == [bad[3] + "3"]
        for name in bad:
            answer = server.ask(f"/api/runs/{server.key}/members/{quote(name)}/log")
            assert answer[0] in (400, 404) and b"root:" not in answer[2]


def quote(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="", errors="surrogatepass")


# --- what is not only this machine's -------------------------------------------------------------------------


def test_an_address_that_others_reach_is_said_in_one_line_with_its_names(run: Path) -> None:
    with serve(run, "--host", "0.0.0.0", "--allow-host", "gpu.example:443", "--allow-host", "lab") as server:
        (line,) = (line for line in server.said if "plain HTTP" in line)
        for said in (
            "ssh -L",
            "--allow-host",
            f"localhost:{server.port}",
            f"lab:{server.port}",
            socket.gethostname(),
        ):
            assert said in line
        for host in (f"lab:{server.port}", "gpu.example:443", "gpu.example"):
            assert server.ask("/api/runs", Host=host)[0] == 200
            assert server.ask("/api/runs", Host=host, Origin=f"https://{host}")[0] == 200
        refused(server.ask("/api/runs", Host="lab"), 403)
        refused(server.ask("/api/runs", Host=f"evil.example:{server.port}"), 403)


def test_by_default_only_this_machine_reaches_it(server: Server) -> None:
    import psutil

    found = psutil.Process(server.process.pid).net_connections("tcp")
    assert {each.laddr.ip for each in found if each.status == "LISTEN"} == {"127.0.0.1"}


def test_the_names_of_a_server() -> None:
    assert allowed_hosts("127.0.0.1", 8270, ["node"]) == {"127.0.0.1:8270", "localhost:8270"}
    assert allowed_hosts("::1", 80, ()) == {"[::1]:80", "[::1]", "localhost:80", "localhost"}
    assert allowed_hosts("10.0.0.5", 9, ["Node"]) == {"10.0.0.5:9", "node:9"}
    assert allowed_hosts("0.0.0.0", 9, ["fe80::1"], ["a:b"]) >= {"[fe80::1]:9", "localhost:9", "127.0.0.1:9"}


# --- scrapers ------------------------------------------------------------------------------------------------


def test_a_scrapers_token_opens_the_metrics_and_nothing_else(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-some-length\n")
    file.chmod(0o600)
    with serve(run, "--metrics-token-file", str(file)) as server:
        bearer = "Bearer a-token-of-some-length"
        assert server.ask("/metrics", cookie="", at_root=True, Authorization=bearer)[0] == 200
        refused(server.ask("/api/runs", cookie="", Authorization=bearer), 401)
        refused(server.ask("/metrics", cookie="", at_root=True, Authorization="Bearer another"), 401)
        refused(server.ask("/metrics", cookie=""), 401)
        assert server.ask("/metrics", "POST", {}, "", at_root=True, Authorization=bearer)[0] == 401


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606])
def test_a_token_that_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-some-length")
    file.chmod(0o600)
    assert read_token_file(file) == "a-token-of-some-length"
    file.chmod(mode)
    with pytest.raises(StoreError, match="can be read by others"):
        read_token_file(file)


def test_a_token_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-some-length")
    file.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(file, 65534, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match="belongs to another user"):
        read_token_file(file)
