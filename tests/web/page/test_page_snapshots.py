"""The page shows a coordinator, and changed parts of it are sent again."""

from __future__ import annotations

from typing import Any

import msgspec

from stage_runtime.web import serving
from stage_runtime.web.page import snapshots
from stage_runtime.web.page.snapshots import Frame, Snapshot
from tests.web.page.page_pipelines import LOADING, record, samples, status

GROUPS = {"listen": "ears", "think": "head", "speak": "head"}
EDGES = [("listen", "think", "normal"), ("think", "speak", "stream")]
ABOUT = {"model": "m"}


def taken(shown: dict[str, Any], *, records: Any = (), done: int = 10) -> Snapshot:
    return snapshots.take(shown, samples(GROUPS, done=done), records, now=5.0, about=ABOUT)


def plain(frames: list[Frame]) -> dict[str, Any]:
    return {name: msgspec.json.decode(msgspec.json.encode(data)) for name, data in frames}


def test_a_page_that_shows_nothing_is_sent_everything() -> None:
    found = plain(list(snapshots.changes(None, taken(status(GROUPS, EDGES), records=[record("r", list(GROUPS))]))))
    assert list(found) == ["pipeline", "load", "instances", "requests"]
    assert found["pipeline"]["groups"] == GROUPS and found["pipeline"]["model"] == "m"
    assert found["load"]["outcomes"] == {"completed": 10, "stage_failed": 2}
    assert found["load"]["stages"]["think"] == {
        "waiting": 2,
        "running": 1,
        "busy": 0.1,
        "queue_s": 0.02,
        "run_s": 0.2,
        "done": 10,
    }
    assert found["load"]["edges"] == [
        {"source": "listen", "target": "think", "relay": "shm", "bytes": 5e6, "in_flight": 0, "media": {"memory": 1}}
    ]
    assert [one["group"] for one in found["instances"]["changed"]] == ["ears", "head"]
    assert found["requests"]["changed"][0]["bars"] == [["listen", 2, 12], ["think", 14, 24], ["speak", 26, 36]]


def test_only_rows_that_have_changed_are_sent_again() -> None:
    first, second = status(GROUPS, EDGES, instances=500), status(GROUPS, EDGES, instances=500)
    second["instances"][7]["ready"] = False
    gone = second["instances"].pop(8)["incarnation"]
    one, two = record("one", ["listen"]), record("two", ["listen"])
    found = plain(list(snapshots.changes(taken(first, records=[one]), taken(second, records=[two, one]))))
    assert list(found) == ["load", "instances", "requests"]
    assert [(each["incarnation"], each["state"]) for each in found["instances"]["changed"]] == [
        (second["instances"][7]["incarnation"], "loading")
    ]
    assert found["instances"]["gone"] == [gone]
    assert [each["id"] for each in found["requests"]["changed"]] == ["two"]
    assert found["requests"]["gone"] == []


def test_nothing_but_the_load_is_sent_while_nothing_changes() -> None:
    shown, one = status(GROUPS, EDGES), record("one", ["listen"])
    assert list(plain(list(snapshots.changes(taken(shown, records=[one]), taken(shown, records=[one]))))) == ["load"]


def test_a_loading_instance_is_sent_again_while_its_share_grows_and_no_other_row() -> None:
    before, now = status(GROUPS, EDGES, instances=2, loading=1), status(GROUPS, EDGES, instances=2, loading=1)
    now["instances"][0]["loading"] = [{**LOADING, "done": 2.0e9}]
    (row,) = plain(list(snapshots.changes(taken(before), taken(now))))["instances"]["changed"]
    assert row["loading"] == [{**LOADING, "done": 2.0e9}]


def test_the_state_of_an_instance_is_the_first_reason_why_it_gets_nothing() -> None:
    cases = [
        ({}, "ready"),
        ({"ineligible_reason": "old"}, "unused"),
        ({"ready": False, "ineligible_reason": "old"}, "loading"),
        ({"aside": True, "ready": False}, "aside"),
        ({"draining": True, "aside": True}, "draining"),
    ]
    for change, state in cases:
        shown = status({"a": "a"}, [])
        shown["instances"][0].update(change)
        rows = plain(list(snapshots.changes(None, taken(shown))))["instances"]["changed"]
        assert [row["state"] for row in rows] == [state]


def test_a_frame_is_one_event_whatever_stands_in_a_message() -> None:
    hostile = "a\n\ndata: {}\r\n\u2028event: load\u0085"
    failed = record("r", ["listen"], error={"code": "stage_failed", "message": hostile, "stage": "listen"})
    frames = list(snapshots.changes(None, taken(status(GROUPS, EDGES), records=[failed])))
    text = b"".join(serving.named_frame(name, data) for name, data in frames).decode()
    assert len(text.splitlines()) == 3 * len(frames)
    assert plain(frames)["requests"]["changed"][0]["error"]["message"] == hostile


def test_a_long_reason_is_cut() -> None:
    failed = record("r", ["listen"], error={"code": "stage_failed", "message": "x" * 5000, "stage": "listen"})
    rows = plain(list(snapshots.changes(None, taken(status(GROUPS, EDGES), records=[failed]))))["requests"]["changed"]
    assert len(rows[0]["error"]["message"]) == snapshots.MOST_LETTERS
