"""A task as a resource: made, told, steered, answered, stopped, taken back; by its owner alone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_support import RunningServer, scripted_model, serving

from keystroke.agent.loop import AgentTask
from keystroke.config import NamedModel, ServerSettings
from keystroke.engine.model import Model
from keystroke.protocol.codec import decode_task_event

BROKEN = "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a + b\n"
FIXED = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
CHECK = "python3 -c 'from calc import add; assert add(1, 2) == 3'"


class Bench:
    """A project, and a client of a server that does tasks in it."""

    def __init__(self, server: RunningServer, root: Path, key: str = "") -> None:
        self.server, self.root = server, root
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=server.url, timeout=60, headers=headers)

    def create(self, instruction: str = "make add in calc.py add", **fields: Any) -> dict[str, Any]:
        body = {"workspace": str(self.root), "instruction": instruction, **fields}
        return self.ok(self.http.post("/v1/tasks", json=body))

    def act(self, task: str, what: str, **fields: Any) -> dict[str, Any]:
        return self.ok(self.http.post(f"/v1/tasks/{task}/{what}", json=fields))

    def refused(self, task: str, what: str, **fields: Any) -> tuple[int, str]:
        answer = self.http.post(f"/v1/tasks/{task}/{what}", json=fields)
        return answer.status_code, answer.json()["error"]["message"]

    def get(self, task: str) -> dict[str, Any]:
        return self.ok(self.http.get(f"/v1/tasks/{task}"))

    def until(self, task: str, *statuses: str) -> dict[str, Any]:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            seen = self.get(task)
            if seen["status"] in statuses:
                return seen
            time.sleep(0.01)
        raise AssertionError(f"{task} is {seen['status']}: {seen['line']}")

    def events(self, task: str, after: int = 0) -> list[dict[str, Any]]:
        with self.http.stream("GET", f"/v1/tasks/{task}/events", params={"after": after}) as answer:
            return list(told(answer))

    @staticmethod
    def ok(answer: httpx.Response) -> dict[str, Any]:
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


def told(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    number = ""
    for line in answer.iter_lines():
        if line.startswith("id: "):
            number = line[4:]
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            decode_task_event(line[6:])  # every event is one of the types
            assert str(event["sequence_number"]) == number
            yield event


def small(script: Callable[[str], str], **costs: Any) -> Model:
    return scripted_model(script, "worker", **costs)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "calc.py").write_text(BROKEN)
    return folder


@pytest.fixture
def bench(tmp_path: Path, root: Path) -> Iterator[Bench]:
    model = small(lambda prompt: f"{FIXED}```\n")
    with serving(model, folder=tmp_path / "state") as server:
        yield Bench(server, root)
        assert server.settled()


def text(root: Path) -> str:
    return (root / "calc.py").read_text()


def test_a_task_waits_for_a_yes_lands_and_can_be_taken_back(bench: Bench, root: Path) -> None:
    task = bench.create(check=CHECK)["id"]
    asking = bench.until(task, "asking")
    assert asking["question"]["kind"] == "change"
    assert [hunk["after"] for hunk in asking["question"]["hunks"]] == [
        "    return a + b\n",
        "    return a - b\n",
    ]
    assert text(root) == BROKEN
    bench.act(task, "approve", question="q1")
    done = bench.until(task, "done")
    assert text(root) == FIXED
    assert done["entry"]
    assert done["receipts"][0]["model"] == "worker"
    assert done["receipts"][0]["tokens"] > 0
    kinds = [event["type"] for event in bench.events(task)]
    assert kinds[0] == "task.created"
    assert kinds[-1] == "task.ended"
    for kind in ("began", "doing", "noted", "changed", "spent", "asked", "answered"):
        assert f"task.{kind}" in kinds
    assert bench.act(task, "undo")["status"] == "undone"
    assert text(root) == BROKEN
    assert bench.refused(task, "undo")[0] == 400


def test_only_the_hunks_that_were_taken_land(bench: Bench, root: Path) -> None:
    task = bench.create()["id"]
    bench.until(task, "asking")
    assert bench.refused(task, "approve", hunks=[0, 9]) == (400, "there is no hunk 9 in this question")
    bench.act(task, "approve", hunks=[0])
    bench.until(task, "done")
    assert text(root) == BROKEN.replace("a - b", "a + b", 1)


def test_a_change_that_was_refused_can_be_applied_later(bench: Bench, root: Path) -> None:
    task = bench.create()["id"]
    bench.until(task, "asking")
    bench.act(task, "reject")
    bench.until(task, "proposed")
    assert text(root) == BROKEN
    shown = bench.ok(bench.http.get(f"/v1/tasks/{task}/diff"))
    assert len(shown["hunks"]) == 2
    assert bench.act(task, "apply", hunks=[1])["status"] == "done"
    assert text(root) == BROKEN.replace("a + b", "a - b", 1)
    assert bench.act(task, "undo")["status"] == "undone"
    assert text(root) == BROKEN
    assert [e["type"] for e in bench.events(task)][-2:] == ["task.landed", "task.undone"]


@pytest.fixture
def leaving_slowly(monkeypatch: pytest.MonkeyPatch) -> list[AgentTask]:
    """Tasks whose threads take a while to leave after their end was told; and all that were begun."""
    work, begun = AgentTask.run, []

    def run(task: AgentTask, *given: Any) -> object:
        begun.append(task)
        ended = work(task, *given)
        time.sleep(0.5)
        return ended

    monkeypatch.setattr(AgentTask, "run", run)
    return begun


@pytest.mark.usefixtures("leaving_slowly")
def test_a_task_that_says_done_can_be_taken_back_at_once(bench: Bench, root: Path) -> None:
    task = bench.create(approve="never")["id"]
    bench.until(task, "done")
    assert bench.act(task, "undo")["status"] == "undone"
    assert text(root) == BROKEN


@pytest.mark.parametrize("other", ["resume", "undo"])
def test_of_two_who_wait_for_a_leaving_task_one_is_told_that_it_goes_on(
    bench: Bench, leaving_slowly: list[AgentTask], other: str
) -> None:
    task = bench.create(approve="never")["id"]
    bench.until(task, "done")

    def ask(what: str) -> int:
        with httpx.Client(base_url=bench.server.url, timeout=60) as http:
            return http.post(f"/v1/tasks/{task}/{what}", json={}).status_code

    with ThreadPoolExecutor(2) as both:
        answers = sorted(both.map(ask, ["resume", other]))
    kinds = [event["type"] for event in bench.events(task)]
    if other == "resume":
        assert answers == [200, 400]
    else:  # taken back and then gone on with, or refused since it goes on
        assert answers == ([200, 200] if "task.undone" in kinds else [200, 400])
        assert "task.undone" not in kinds[kinds.index("task.ended") + 2 :]
    assert len(leaving_slowly) == 2
    assert kinds.count("task.began") == 2


def test_undo_refuses_where_a_file_was_changed_since(bench: Bench, root: Path) -> None:
    task = bench.create(approve="never")["id"]
    bench.until(task, "done")
    (root / "calc.py").write_text("mine = 1\n")
    status, message = bench.refused(task, "undo")
    assert (status, text(root)) == (400, "mine = 1\n")
    assert "was changed after the edit" in message


def test_events_go_on_after_the_last_one_seen(bench: Bench) -> None:
    task = bench.create(approve="never")["id"]
    whole = bench.events(task)
    numbers = [event["sequence_number"] for event in whole]
    assert numbers == sorted(set(numbers))
    half = numbers[len(numbers) // 2]
    assert bench.events(task, half) == [event for event in whole if event["sequence_number"] > half]
    browser = bench.http.get(f"/v1/tasks/{task}/events", headers={"last-event-id": str(half)})
    assert list(told(browser)) == bench.events(task, half)


def test_a_task_can_be_streamed_from_its_making(bench: Bench, root: Path) -> None:
    body = {
        "workspace": str(root),
        "instruction": "make add in calc.py add",
        "stream": True,
        "approve": "never",
    }
    with bench.http.stream("POST", "/v1/tasks", json=body) as answer:
        events = list(told(answer))
    assert events[0]["type"] == "task.created"
    assert events[-1]["task"]["status"] == "done"


def test_a_listener_that_leaves_changes_nothing(bench: Bench, root: Path) -> None:
    body = {"workspace": str(root), "instruction": "make add in calc.py add", "stream": True, "check": CHECK}
    with bench.http.stream("POST", "/v1/tasks", json=body) as answer:
        task = next(told(answer))["task_id"]
    bench.until(task, "asking")
    bench.act(task, "approve")
    bench.until(task, "done")
    assert text(root) == FIXED


def test_cancelling_stops_a_task_in_mid_answer_and_it_can_be_gone_on_with(tmp_path: Path, root: Path) -> None:
    slow = threading.Event()
    model = small(lambda prompt: f"{FIXED}```\n" if slow.is_set() else "x" * 100_000, step_cost=0.002)
    with serving(model, folder=tmp_path / "state") as server:
        bench = Bench(server, root)
        task = bench.create(approve="never")["id"]
        bench.until(task, "working")
        began = time.monotonic()
        stopped = bench.act(task, "cancel")
        assert stopped["status"] == "interrupted"
        assert time.monotonic() - began < 60  # the answer would take minutes
        assert server.settled()
        assert text(root) == BROKEN
        assert bench.refused(task, "steer", line="too late")[0] == 400
        slow.set()
        before = len(bench.events(task))
        assert bench.act(task, "resume")["id"] == task
        bench.until(task, "done")
        assert text(root) == FIXED
        assert len(bench.events(task)) > before


def test_cancelling_answers_an_open_question(bench: Bench, root: Path) -> None:
    task = bench.create()["id"]
    bench.until(task, "asking")
    assert bench.act(task, "cancel")["status"] == "interrupted"
    assert text(root) == BROKEN


def test_a_line_said_in_mid_answer_turns_it_and_keeps_what_was_computed(tmp_path: Path, root: Path) -> None:
    def script(prompt: str) -> str:
        return f"{FIXED}```\n" if "really add" in prompt else "def add(a, b):\n" + "    # hm\n" * 10_000

    model = small(script, step_cost=0.001)
    with serving(model, folder=tmp_path / "state") as server:
        bench = Bench(server, root)
        task = bench.create(approve="never")["id"]
        end = time.monotonic() + 60
        while not server.engines["worker"].live and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        bench.act(task, "steer", line="really add")
        bench.until(task, "done")
        assert text(root) == FIXED
        assert "task.steered" in [event["type"] for event in bench.events(task)]


def test_the_deep_model_takes_over_when_asked_to(tmp_path: Path, root: Path) -> None:
    fast = small(lambda prompt: "def add(a, b):\n" + "    # hm\n" * 10_000, step_cost=0.001)
    deep = scripted_model(lambda prompt: f"{FIXED}```\n", "thinker")
    with serving(fast, deep, roles={"thinker": "deep"}, folder=tmp_path / "state") as server:
        bench = Bench(server, root)
        task = bench.create(model="worker", approve="never")["id"]
        bench.until(task, "working")
        bench.act(task, "steer", deep=True)
        done = bench.until(task, "done")
        assert text(root) == FIXED
        assert {receipt["model"] for receipt in done["receipts"]} >= {"thinker"}
        assert any("thinker takes over" in e.get("line", "") for e in bench.events(task))


def test_handing_over_needs_a_deep_model(bench: Bench) -> None:
    task = bench.create()["id"]
    bench.until(task, "asking")
    assert bench.refused(task, "steer", deep=True)[0] == 400
    bench.act(task, "cancel")


def test_of_several_attempts_the_first_that_passes_is_kept(tmp_path: Path, root: Path) -> None:
    answers = iter(["def add(a, b):\n    return a * b\n```\n"] * 2 + [f"{FIXED}```\n"] * 20)
    model = small(lambda prompt: next(answers))
    with serving(model, folder=tmp_path / "state") as server:
        bench = Bench(server, root)
        task = bench.create(approve="never", attempts=4, check=CHECK)["id"]
        done = bench.until(task, "done")
        assert text(root) == FIXED
        assert done["receipts"][0]["attempts"] >= 3
        assert server.settled()


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"workspace": "/"}, 403, "too large for a task"),
        ({"workspace": "relative"}, 400, "absolute path"),
        ({"workspace": "/no/such/folder"}, 404, "no folder"),
        ({"workspace": "/tmp\0x"}, 400, "absolute path"),
        ({"instruction": "  "}, 400, "empty"),
        ({"model": "nobody"}, 404, "no model called nobody"),
        ({"deep": "nobody"}, 404, "no model called nobody"),
        ({"attempts": -1}, 400, "attempts"),
        ({"approve": "always"}, 400, "approve"),
    ],
)
def test_what_cannot_be_begun_is_refused_with_a_reason(
    bench: Bench, fields: dict[str, Any], status: int, says: str
) -> None:
    body = {"workspace": str(bench.root), "instruction": "do", **fields}
    answer = bench.http.post("/v1/tasks", json=body)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


def test_a_file_outside_the_workspace_ends_the_task_and_nothing_is_read(bench: Bench) -> None:
    task = bench.create(files=["../secret.py"])["id"]
    assert "must name a file inside" in bench.until(task, "failed")["line"]


def test_a_server_that_others_reach_works_only_where_it_may(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYSTROKE_API_KEY", "one,other")
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "link").symlink_to(outside)
    settings = ServerSettings(workspaces=(str(root),))
    model = small(lambda prompt: f"{FIXED}```\n")
    with serving(model, folder=tmp_path / "state", server=settings) as server:
        bench, other = Bench(server, root, "one"), Bench(server, root, "other")
        for place in (outside, root / "link", root.parent):
            answer = bench.http.post("/v1/tasks", json={"workspace": str(place), "instruction": "do"})
            assert answer.status_code == 403
        task = bench.create()["id"]
        bench.until(task, "asking")
        for what in ("approve", "reject", "cancel", "steer", "undo", "apply", "resume"):
            assert other.refused(task, what, **({"line": "x"} if what == "steer" else {}))[0] == 404
        assert other.http.get(f"/v1/tasks/{task}").status_code == 404
        assert other.http.get(f"/v1/tasks/{task}/events").status_code == 404
        assert other.ok(other.http.get("/v1/tasks"))["data"] == []
        assert [known["id"] for known in bench.ok(bench.http.get("/v1/tasks"))["data"]] == [task]
        bench.act(task, "cancel")
        assert httpx.get(f"{server.url}/v1/tasks/{task}").status_code == 401


def test_a_task_outlives_its_server(tmp_path: Path, root: Path) -> None:
    endless = small(lambda prompt: "x" * 100_000, step_cost=0.002)
    with serving(endless, folder=tmp_path / "state") as server:
        bench = Bench(server, root)
        task = bench.create(approve="never", check=CHECK)["id"]
        bench.until(task, "working")
    with serving(small(lambda prompt: f"{FIXED}```\n"), folder=tmp_path / "state") as server:
        bench = Bench(server, root)
        assert bench.get(task)["status"] == "interrupted"
        listed = bench.ok(bench.http.get("/v1/tasks", params={"workspace": str(root)}))["data"]
        assert [known["id"] for known in listed] == [task]
        assert [event["type"] for event in bench.events(task)] == ["task.ended"]
        bench.act(task, "resume")
        assert bench.until(task, "done")["check"] == CHECK
        assert text(root) == FIXED
        bench.act(task, "undo")
        assert text(root) == BROKEN


def test_the_one_key_of_a_loopback_server_is_this_machine_s_user(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared gateway has a new key each time it starts; its tasks are found again all the same."""
    model = small(lambda prompt: f"{FIXED}```\n")
    for key in ("first", "second"):
        monkeypatch.setenv("KEYSTROKE_API_KEY", key)
        with serving(model if key == "first" else small(lambda p: ""), folder=tmp_path / "state") as server:
            bench = Bench(server, root, key)
            if key == "first":
                task = bench.create(approve="never")["id"]
                bench.until(task, "done")
            else:
                assert bench.act(task, "undo")["status"] == "undone"


def test_a_task_waits_its_turn_and_can_be_stopped_there(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keystroke.gateway.tasks.manager._MAX_RUNNING", 1)
    model = small(lambda prompt: f"{FIXED}```\n")
    with serving(model, folder=tmp_path / "state") as server:
        bench = Bench(server, root)
        first, second, third = (bench.create()["id"] for _ in range(3))
        bench.until(first, "asking")
        assert bench.get(second)["status"] == bench.get(third)["status"] == "queued"
        assert bench.act(second, "cancel")["status"] == "interrupted"
        positions = [e["position"] for e in iter_queued(bench, third)]
        assert positions == [2, 1]
        bench.act(first, "reject")
        bench.until(third, "asking")
        bench.act(third, "cancel")


def iter_queued(bench: Bench, task: str) -> list[dict[str, Any]]:
    """The places a waiting task was told, read without waiting for its end."""
    found = []
    with bench.http.stream("GET", f"/v1/tasks/{task}/events") as answer:
        for event in told(answer):
            if event["type"] == "task.queued":
                found.append(event)
            if len(found) == 2:
                return found
    return found


def test_a_limit_that_is_reached_is_waited_out(tmp_path: Path, root: Path) -> None:
    """Attempts over what a key may have at once wait for each other instead of failing the task."""
    model = small(lambda prompt: f"{FIXED}```\n")
    tables = {"worker": NamedModel(concurrent=8, concurrent_per_key=1)}
    with serving(model, folder=tmp_path / "state", tables=tables) as server:
        bench = Bench(server, root)
        task = bench.create(approve="never", attempts=3, check=CHECK)["id"]
        bench.until(task, "done")
        assert text(root) == FIXED
