"""What the page asks of a run becomes the request files that the commands write, or is refused in one line."""

from __future__ import annotations

import json
import sys
import threading
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from dashboard_process import HANG_S, serve
from kit import run_events

import ensemble
from ensemble.events import RequestAnswered
from ensemble.reporting.dashboard.actions import ActionError, parse_action
from ensemble.reporting.dashboard.runs import make_key
from ensemble.store import RunDir, read_events, receive_requests
from ensemble.store.requests import find_user

MEMBERS = {"member-0", "member-1"}


CHANGED = {"params": {"lr": 0.1, "on": True, "by": "x"}}


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        ({"verb": "stop"}, {}),
        ({"verb": "stop", "at_once": True, "member": None}, {"at_once": True}),
        ({"verb": "cancel", "members": ["member-0"]}, {"members": ["member-0"]}),
        ({"verb": "cancel", "member": "member-0"}, {"member": "member-0"}),
        ({"verb": "add", **CHANGED}, {"declared": CHANGED}),
        ({"verb": "add", "from": "member-0", "warm": True, **CHANGED},
         {"declared": CHANGED, "from": "member-0", "warm": True}),
    ],
)  # fmt: skip
def test_an_action_is_the_request_that_a_command_writes(asked: Any, fields: Any) -> None:
    assert parse_action(json.dumps(asked).encode(), MEMBERS) == (asked["verb"], fields)


OF_NOBODY = """\
{"verb":"pause","member":"member-9"}
{"verb":"pause","members":["member-0","../member-0"]}
{"verb":"add","from":"member-9"}""".splitlines()
NO_ACTIONS = r"""
{"verb":"resum"}
{"verb":"stop","member":"member-0"}
{"verb":"stop","at_once":1}
{"verb":"stop","path":"/etc"}
{"verb":"pause","member":["member-0"]}
{"verb":"pause","members":[]}
{"verb":"pause","members":["member-0"],"member":"member-0"}
{"verb":"add","warm":true}
{"verb":"add","params":[1]}
{"verb":"add","params":{"lr":[1]}}
{"verb":"add","params":{"lr":NaN}}
{"verb":"add","params":{"":1}}
{"verb":"add","params":{"lr":"\ud800"}}""".splitlines()
NO_ACTIONS += ["[" * 50_000, '{"verb":"pause","member":"\xff"}']
NO_ACTIONS += [json.dumps({"verb": "add", "params": {"lr": "x" * 20_000}})]
NO_ACTIONS += [json.dumps({"verb": "add", "params": {str(n): n for n in range(300)}})]


@pytest.mark.parametrize(("body", "status"), [*product(NO_ACTIONS, [400]), *product(OF_NOBODY, [404])])
def test_what_is_no_action_is_refused_in_one_line(body: str, status: int) -> None:
    with pytest.raises(ActionError) as refusal:
        parse_action(body.encode("latin-1"), MEMBERS)
    assert refusal.value.status == status and "\n" not in refusal.value.why and len(refusal.value.why) < 300


def write_run(path: Path, **options: Any) -> Path:
    run = run_events.write_run(path, run_events.list_run(**options))
    (run / "requests").mkdir()
    return run


def test_a_request_reaches_a_run_that_goes_on_and_none_outside_the_folder_is_compared(tmp_path: Path) -> None:
    outside, folder = write_run(tmp_path / "outside"), tmp_path / "runs"
    run, ended = write_run(folder / "run", until=20.0), write_run(folder / "was")
    with serve(folder) as server:
        [target, of_ended] = [f"/api/runs/{row['key']}/actions" for row in server.get("/api/runs")]
        status, _, body = server.ask(target, "POST", {"verb": "pause", "member": "member-2"})
        (request,) = receive_requests(run, set())
        assert status == 202 and request["id"] == json.loads(body)["request"]
        assert (request["verb"], request["member"], request["unreadable"]) == ("pause", "member-2", None)
        assert request["by"].startswith(f"{find_user()}'s page, from ") and "127.0.0.1" in request["by"]
        status, _, body = server.ask(target, "POST", {"verb": "pause", "member": "nobody"})
        assert (status, json.loads(body)) == (404, {"error": "there is no member 'nobody'"})
        status, _, body = server.ask(of_ended, "POST", {"verb": "stop"})
        assert status == 409 and "has ended" in json.loads(body)["error"]
        many = ",".join(map(str, range(51)))
        for runs, status in ((make_key(outside), 404), ("..", 404), ("", 400), (many, 400)):
            assert server.ask(f"/api/compare?runs={runs}")[0] == status, runs
        assert server.ask(f"/api/compare?runs={server.key}", cookie="")[0] == 401
        assert len(server.get(f"/api/compare?runs={server.key},{server.key}")["runs"]) == 1
    assert receive_requests(run, set()) == [] == list((ended / "requests").iterdir())


@pytest.mark.more
def test_a_run_in_progress_pauses_a_member_goes_on_clones_one_and_stops(tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "cli"))
    from test_cli import SPEC

    from ensemble.spec.spec_file import load_spec

    (tmp_path / "tiny.py").write_text(SPEC)
    (tmp_path / "hold").write_text("")
    declared = load_spec(str(tmp_path / "tiny.py"), [f"hold={tmp_path / 'hold'}", "epochs=1000"])
    run = ensemble.submit(declared, run_dir=tmp_path / "run", executor="local", spec_file=tmp_path / "tiny.py")
    ended = threading.Thread(target=run.wait)
    ended.start()
    try:
        with serve(tmp_path / "run") as server:
            at = f"/api/runs/{server.key}"
            with server.stream(f"{at}/events") as messages:

                def ask(**action: Any) -> dict[str, Any]:
                    status, _, body = server.ask(f"{at}/actions", "POST", action)
                    assert status == 202, body
                    while True:
                        for answer in messages.next()[2]["answers"]:
                            if answer["request"] == json.loads(body)["request"]:
                                return dict(answer)

                paused = ask(verb="pause", member="member-0")
                assert paused["done"] and paused["member"] == "member-0"
                events = read_events(RunDir(tmp_path / "run").events)
                by = next(event.by for event in events if isinstance(event, RequestAnswered))
                assert by is not None and by.startswith(f"{find_user()}'s page, from ")
                assert ask(verb="resume", member="member-0")["done"]
                clone = ask(verb="add", **{"from": "member-1"}, params={"lr": 0.05})
                assert clone["done"] and clone["member"] == "member-2"
                assert not ask(verb="add", **{"from": "member-1"}, params={"lrr": 0.05})["done"]
                assert ask(verb="stop")["done"]
            ended.join(HANG_S)
            shown = server.get(f"{at}/state")["run"]
            assert (shown["state"]["word"], shown["actions"]) == ("stopped", [])
    finally:
        if ended.is_alive():
            run.stop()
            ended.join(HANG_S)
    assert not list(RunDir(tmp_path / "run").requests.iterdir())
