"""Attacks on the live page, a real server over real sockets: what is refused, and that nothing has happened."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from dashboard_process import Messages, Server, serve
from kit import run_events
from kit.event_dicts import lines

SECRET = "a file that nobody is shown"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    yield
    assert list((run / "requests").iterdir()) == []
    assert server.get("/api/runs")[0]["name"] == "digits"
    assert server.process.poll() is None


def refused(answer: tuple[int, dict[str, str], bytes], status: int) -> None:
    found, headers, body = answer
    assert found == status, answer
    assert SECRET.encode() not in body and b"member-0" not in body and "set-cookie" not in headers
    assert headers["x-content-type-options"] == "nosniff"
    assert "script-src 'self';" in headers["content-security-policy"]


Attack = tuple[int, str, str, str | None, bool, dict[str, str | None]]


def attack(status: int, target: str = "/api/runs", method: str = "GET", **more: Any) -> Attack:
    """A request and the status that refuses it; `{port}` is the server's; the cookie None is the session's."""
    return status, target, method, more.pop("cookie", None), more.pop("at_root", False), more


def stop(status: int, **more: str | None) -> Attack:
    return attack(status, "/api/runs/{key}/actions", "POST", **more)


PAGES = ("/", "/static/app.js", "/api/runs", "/api/runs/events", "/metrics", "/nothing")
TOKENS = ("", "wrong", "%00", "%E9", "a" * 5000)
FORGED = ("ensemble_{port}={short}", "ensemble_{port}=", "ensemble_{port}={value}x", "ensemble={value}", "nsinn")
HOSTS = ("evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil:{port}", "127.0.0.1:{port}.")
LINK = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
METHODS = ("TRACE", "PUT", "DELETE", "PATCH", "CONNECT", "PROPFIND", "OPTIONS")
FOREIGN = ("http://evil.example", "null", "http://127.0.0.1:1", "http://localhost")
ATTACKS = [
    *(attack(401, target, cookie="", at_root=at_root) for target in PAGES for at_root in (True, False)),
    *(attack(401, f"/?token={token}", cookie="", at_root=True) for token in TOKENS),
    *(attack(401, cookie=cookie) for cookie in FORGED),
    *(attack(403, Host=host) for host in HOSTS),
    *(attack(400, Host=host) for host in (None, "")),
    *(attack(403, Origin=origin) for origin in FOREIGN),
    *(attack(403, Sec_Fetch_Site=site) for site in ("cross-site", "same-site")),
    attack(403, **LINK, Sec_Fetch_Dest="document"),
    attack(403, "/", **LINK, Sec_Fetch_Dest="iframe"),
    attack(401, "/", cookie="", **LINK, Sec_Fetch_Dest="document"),
    *(stop(403, Origin=origin) for origin in (None, "null", "http://evil.example")),
    stop(403, Origin="https://evil.example", Sec_Fetch_Site="same-origin"),
    stop(403, Sec_Fetch_Site="cross-site"),
    *(stop(415, Content_Type=kind) for kind in ("text/plain", "application/x-www-form-urlencoded", None)),
    stop(415, Content_Type="multipart/form-data; boundary=x"),
    stop(415, Content_Encoding="gzip"),
    stop(401, cookie="ensemble_1=x"),
    *(attack(405, target, method) for target in ("/", "/api/runs/{key}/actions") for method in METHODS),
]


@pytest.mark.parametrize("asked", ATTACKS, ids=lambda asked: ", ".join(str(part) for part in asked if part)[:80])
def test_what_no_user_asks_for_is_refused(asked: Attack, server: Server) -> None:
    status, target, method, cookie, at_root, headers = asked
    value = server.cookie.partition("=")[2]
    known = {"port": server.port, "key": server.key, "value": value, "short": value[:-1]}
    cookie = None if cookie is None else cookie.format(**known)
    sent = {name: text and text.format(**known) for name, text in headers.items()}
    body = {"verb": "stop"} if method == "POST" else None
    answer = server.ask(target.format(**known), method, body, cookie, at_root=at_root, **sent)
    assert b"digits" not in answer[2] and "access-control-allow-origin" not in answer[1]
    if status in (401, 403, 415):
        refused(answer, status)
    assert answer[0] in (400, status)


def test_the_tokens_cookie_can_be_read_by_no_script_and_goes_to_no_other_site(run: Path, server: Server) -> None:
    with serve(run, log_in=False) as other:
        target = other.url[other.url.index("/?") :]
        refused(other.ask(target, "HEAD", cookie="", at_root=True), 401)
        other.log_in()
        assert other.get("/api/runs")
        _, headers, _ = other.ask(target, cookie="", at_root=True)
        cookie, *attributes = headers["set-cookie"].split("; ")
        assert cookie.startswith(f"ensemble_{other.port}=") and len(cookie) > 50
        assert sorted(attributes) == ["HttpOnly", f"Path={headers['location']}", "SameSite=Strict"]
        assert other.url.partition("=")[2] not in cookie
        refused(other.ask("/api/runs", cookie=f"ensemble_{other.port}={server.cookie.partition('=')[2]}"), 401)
        refused(other.ask("/api/runs", cookie=server.cookie), 401)


def test_the_servers_own_names_and_a_link_from_elsewhere_open_the_page(server: Server) -> None:
    for host in (f"LOCALHOST:{server.port}", f"127.0.0.1:{server.port}"):
        assert server.ask("/api/runs", Host=host)[0] == 200
    assert server.ask("/", **LINK, Sec_Fetch_Dest="document")[0] == 200
    status, headers, body = server.ask("/api/runs", "HEAD")
    assert (status, body) == (200, b"") and int(headers["content-length"]) > 10
    actions = f"/api/runs/{server.key}/actions"
    for target, method in (("/api/runs/events", "HEAD"), (actions, "HEAD"), (actions, "GET")):
        assert server.ask(target, method)[0] == 405


def test_two_host_headers_and_an_absolute_address_are_refused(server: Server) -> None:
    head = f"Host: {server.host}\r\nCookie: {server.cookie}\r\n"
    for request in (
        f"GET {server.root}/api/runs HTTP/1.1\r\n{head}Host: evil.example\r\n\r\n",
        f"GET http://evil.example{server.root}/api/runs HTTP/1.1\r\n{head}\r\n",
        f"GET {server.root}/api/runs HTTP/1.0\r\nCookie: {server.cookie}\r\n\r\n",
    ):
        answer = server.send(request.encode())
        assert answer.split()[1] in (b"400", b"403") and b"digits" not in answer, answer


TRAVERSALS = [
    *("../../secret.txt", "..%2f..%2fsecret.txt", "%2e%2e/%2e%2e/secret.txt", "%252e%252e%252fsecret.txt"),
    *("..%5c..%5csecret.txt", "....//....//secret.txt", "/etc/passwd", "%2fetc%2fpasswd", "app.js%00.png"),
    *(".", "..", "", "../dashboard/feed.py", "%2e%2e/feed.py", "__init__.py/../../feed.py", "~root"),
    *("file:///etc/passwd", "a" * 4000),
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
    outside = tmp_path / "outside" / "member-0"
    outside.mkdir(parents=True)
    (outside / "log.txt").write_text(SECRET)
    events = run_events.list_run(until=20.0)
    linked, replaced = (run_events.write_run(tmp_path / name, events) for name in ("linked", "replaced"))
    for member in ("member-1", "member-2"):
        (linked / "members" / member).mkdir(parents=True)
    (linked / "members" / "member-0").symlink_to(outside)
    (linked / "members" / "member-1" / "log.txt").symlink_to(outside / "log.txt")
    (linked / "members" / "member-2" / "log.txt").write_text("its own\n")
    (replaced / "members").symlink_to(outside.parent)
    with serve(tmp_path) as server, contextlib.ExitStack() as stack:

        def follow(run: Path, member: str) -> Messages:
            (key,) = (row["key"] for row in server.get("/api/runs") if row["dir"] == str(run))
            return stack.enter_context(server.stream(f"/api/runs/{key}/members/{member}/log"))

        secret = [follow(linked, "member-0"), follow(linked, "member-1"), follow(replaced, "member-0")]
        assert follow(linked, "member-2").next()[2]["text"] == "its own\n", "what is no link is read"
        server.process.terminate()
        assert [messages.next()[0] for messages in secret] == ["end"] * 3


HUGE = b"a" * 10_000_000
HEADS = {
    "field": b"GET / HTTP/1.1\r\nHost: x\r\nX: " + HUGE + b"\r\n\r\n",
    "address": b"GET /" + HUGE + b" HTTP/1.1\r\n\r\n",
    "fields": b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (n, HUGE[:990]) for n in range(10_000)) + b"\r\n",
    "nothing": HUGE,
    "TLS": b"\x16\x03\x01" + b"\0" * 1000,
}


@pytest.mark.parametrize("head", HEADS)
def test_huge_heads_are_refused_before_they_are_read(head: str, server: Server) -> None:
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    answer = server.send(HEADS[head], end=True)
    assert answer == b"" or answer.split()[1] in (b"400", b"431"), answer[:200]
    assert process.memory_info().rss - before < 5e6


def test_a_body_that_is_too_large_is_refused(server: Server) -> None:
    body = {"verb": "stop", "at_once": True, "params": " " * 2**17}
    refused(server.ask(f"/api/runs/{server.key}/actions", "POST", body), 413)


FRAMINGS = [
    *(f"Content-Length: {length}\r\n\r\n" for length in ("0\r\nContent-Length: 15", "+15", "1_5", "-1")),
    *(f"Transfer-Encoding: {coding}\r\n\r\n" for coding in ("xchunked", "chunked, identity")),
    *(f"Transfer-Encoding: chunked\r\n\r\n{body}" for body in ("-5\r\n", "0x5\r\nabcde\r\n0\r\n\r\n")),
    "Content-Length: 15\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "Transfer-Encoding: chunked\r\nContent-Length: 15\r\n\r\n0\r\n\r\n",
    *("Content-Length : 15\r\n\r\n", "Transfer-Encoding\x0b: chunked\r\n\r\n"),
    *("X: a\nTransfer-Encoding: chunked\n\n", "X: a\r\n b: folded\r\n\x00\r\n\r\n"),
]


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_body_of_doubtful_length_hides_no_second_request(framing: str, server: Server) -> None:
    body = '{"verb":"stop"}'
    own = f"POST {server.root}/api/runs/{server.key}/actions HTTP/1.1\r\nHost: {server.host}\r\n"
    own += f"Cookie: {server.cookie}\r\nOrigin: http://{server.host}\r\nContent-Type: application/json\r\n"
    hidden = f"{own}Content-Length: {len(body)}\r\n\r\n{body}"
    answer = server.send(f"{own}{framing}{hidden}".encode("latin-1"), end=True)
    assert b" 202 " not in answer and answer.count(b"HTTP/1.1 ") <= 1, answer


@pytest.mark.parametrize("many", [200, pytest.param(10**5, marks=pytest.mark.slow)])
def test_members_with_hostile_names(many: int, tmp_path: Path) -> None:
    bad = ["</script><script>alert(1)</script>", "../../../etc/passwd", "\u2028\u202egnp.exe", "__proto__"]
    bad += ["a\nid: 1\ndata: {}\n\n", "\x00\x1b[2J", "\ud800", "<img src=x onerror=alert(1)>", "%s%n{0}${7*7}"]
    bad += ["=cmd|' /C calc'!A0"]
    log = run_events.Log()
    run_events.run_started(log, bad[0], "list", 3, many)
    for n in range(many):
        declared = run_events.identity(n, {"lr": 0.1, bad[n % 3]: bad[n % 7]}, 3)
        log.add(0.2, "member", **declared | {"member": bad[n % len(bad)] + str(n)})
    run = run_events.write_run(tmp_path / "run", log.events())
    with serve(run) as server:
        at = f"/api/runs/{server.key}"
        state = server.get(f"{at}/state")
        assert len(state["members"]["rows"]) == many and state["run"]["name"] == bad[0]
        assert server.get(f"{at}/curves") and server.get("/api/runs")[0]["name"] == bad[0]
        with server.stream(f"{at}/events") as messages:
            messages.next()
            failed = {"v": 2, "t": run_events.START + 9, "type": "failed", "member": bad[3] + "3", "attempt": 0}
            with (run / "events.jsonl").open("ab") as file:
                file.write(lines([failed | {"error": bad[3], "reason": bad[0], "retry": False}]))
            event, _, state = messages.next()
            assert event is None and "failed" in state["members"]["rows"][bad[3] + "3"]
        for name in bad:
            answer = server.ask(f"{at}/members/{quote(name, safe='', errors='surrogatepass')}/log")
            assert answer[0] in (400, 404) and b"root:" not in answer[2]


def test_an_address_that_others_reach_is_said_in_one_line_with_its_names(run: Path) -> None:
    with serve(run, "--host", "0.0.0.0", "--allow-host", "gpu.example:443", "--allow-host", "lab") as server:
        (line,) = (line for line in server.said if "plain HTTP" in line)
        names = (f"localhost:{server.port}", f"lab:{server.port}", socket.gethostname())
        assert all(word in line for word in ("ssh -L", "--allow-host", *names))
        for host in (f"lab:{server.port}", "gpu.example:443", "gpu.example"):
            assert server.ask("/api/runs", Host=host)[0] == 200
            assert server.ask("/api/runs", Host=host, Origin=f"https://{host}")[0] == 200
        refused(server.ask("/api/runs", Host="lab"), 403)
        refused(server.ask("/api/runs", Host=f"evil.example:{server.port}"), 403)


def test_by_default_only_this_machine_reaches_it(server: Server) -> None:
    connections = psutil.Process(server.process.pid).net_connections("tcp")
    assert {each.laddr.ip for each in connections if each.status == "LISTEN"} == {"127.0.0.1"}
