"""The playground in a real browser: everything a person does on it, and what strangers might try."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from page_support import Tab, browser, last_user, needs_browser, scripted_model, serving, visiting

from keystroke.config import ServerSettings

if TYPE_CHECKING:
    from gateway_support import RunningServer
    from playwright.sync_api import Browser

pytestmark = [needs_browser, pytest.mark.browser]

SCRIPT = "\"><img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"


def answers(prompt: str) -> str:
    """Ghost text for a prompt that fills in, and for a conversation what its last line asks for."""
    if "<fim_" in prompt or "[user]" not in prompt:
        return "total + 1\n"
    asked = last_user(prompt)
    if "long" in asked:
        return "word " * 4000
    if "Rename" in prompt:
        return "```\ncount = 1\nprint(count)\n```"
    return f"You said: {asked[-200:]}"


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(
        scripted_model(answers, "small", step_cost=0.002),
        scripted_model(answers, "large", step_cost=0.004),
        roles={"small": "fast", "large": "deep"},
    ) as running:
        yield running


@pytest.fixture
def tab(chrome: Browser, server: RunningServer) -> Iterator[Tab]:
    with visiting(chrome, server) as opened:
        opened.connected()
        yield opened


def test_ghost_text_comes_as_one_types_and_tab_takes_it(tab: Tab) -> None:
    tab.write("sum.py", "total = 0\n")
    tab.page.keyboard.type("total = ")
    assert tab.ghost() == "total + 1"
    tab.page.keyboard.type("to")  # agrees with what is shown: it stays, shorter
    assert tab.ghost() == "tal + 1"
    tab.page.keyboard.press("Tab")
    assert tab.text() == "total = 0\ntotal = total + 1"
    assert tab.page.locator(".ghost").count() == 0
    tab.page.keyboard.press("Control+z")
    assert tab.text().endswith("total = to")


def test_ghost_text_is_taken_by_the_word_and_dismissed(tab: Tab) -> None:
    tab.write("sum.py", "total = 0\n")
    tab.page.keyboard.type("total = ")
    tab.ghost()
    tab.page.keyboard.press("Control+ArrowRight")
    assert tab.text().endswith("total = total")
    assert tab.ghost() == " + 1"
    tab.page.keyboard.press("Escape")
    assert tab.page.locator(".ghost").count() == 0
    tab.page.wait_for_timeout(600)  # the larger model has spoken by now: what was refused does not come back
    assert tab.page.locator(".ghost").count() == 0
    assert tab.text().endswith("total = total")


def test_a_typed_word_is_one_change_whoever_makes_it(tab: Tab) -> None:
    """A key of a keyboard is taken directly; what is composed, pasted or put in by the system is read back
    from the page. Both are text like any other."""
    tab.write("mixed.txt", "start ")
    tab.page.keyboard.type('plain "quoted" ')
    tab.page.keyboard.insert_text("dictated ")
    ime = tab.page.context.new_cdp_session(tab.page)
    ime.send("Input.imeSetComposition", {"text": "か", "selectionStart": 1, "selectionEnd": 1})
    ime.send("Input.insertText", {"text": "可"})
    tab.page.keyboard.type("!")
    assert tab.text() == 'start plain "quoted" dictated 可!'
    tab.page.keyboard.press("Shift+ArrowLeft")
    tab.page.keyboard.type("?")  # takes the place of what is selected
    assert tab.text() == 'start plain "quoted" dictated 可?'
    for _ in range(8):
        tab.page.keyboard.press("Control+z")
    assert tab.text() == "start "


def test_every_key_leaves_a_receipt_and_a_measure(tab: Tab) -> None:
    tab.write("sum.py", "total = 0\n")
    tab.page.keyboard.type("total = ", delay=30)
    tab.ghost()
    tab.until("() => performance.getEntriesByName('key-to-paint').length > 0")
    (first, *_) = tab.page.evaluate(
        "performance.getEntriesByName('key-to-paint').map(e => ({ms: e.duration, ...e.detail}))"
    )
    assert first["ms"] > 0
    assert {"queue", "prefill", "decode", "network", "render"} <= set(first)
    bar = tab.page.locator("#strip button").last
    label = bar.get_attribute("aria-label") or ""
    assert re.search(r"queue .* prefill .* decode .* network .* render .* tokens reused", label), label
    bar.focus()
    assert tab.page.inner_text("#receipt") == label


def test_a_finding_is_fixed_with_one_key(tab: Tab) -> None:
    tab.write("load.py", "import yaml\n\n\ndef load(text):\n    return yaml.load(text, Loader=yaml.Loader)\n")
    tab.page.wait_for_selector("#findings .fix")
    assert tab.page.locator(".finding").count() > 0
    tab.page.keyboard.press("Control+Home")
    tab.page.keyboard.press("F8")
    tab.page.keyboard.press("Alt+Enter")
    tab.until("() => document.getElementById('findings-count').textContent === 'none'")
    assert "yaml.safe_load(text)" in tab.text() or "SafeLoader" in tab.text()


def test_the_next_edit_is_a_jump_and_then_a_change(tab: Tab) -> None:
    text = "def area(width, height):\n    return width * height\n\n\nprint(area(2, 3))\n"
    tab.write("area.py", text, cursor="def area(wid")
    for _ in range(3):
        tab.page.keyboard.press("Backspace")
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.type("bread")
    tab.page.wait_for_selector("#jump:not([hidden])")
    assert "Next edit" in tab.page.inner_text("#jump")
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Tab")
    tab.until("() => [...document.querySelectorAll('.cm-line')][1].textContent.includes('breadth')")


def test_an_instructed_edit_is_taken_by_hunk(tab: Tab) -> None:
    tab.write("count.py", "x = 1\nprint(x)\n")
    tab.page.keyboard.press("Control+k")
    tab.page.keyboard.type("Rename x to count")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector(".hunk")
    assert tab.page.locator(".hunk").count() == 2
    assert tab.text() == "x = 1\nprint(x)\n"  # nothing is changed before it is taken
    tab.page.keyboard.press("r")
    assert tab.page.locator(".hunk").count() == 1
    tab.page.keyboard.press("a")
    assert tab.text() == "x = 1\nprint(count)\n"
    assert tab.page.locator(".hunk").count() == 0


def test_an_answer_is_interrupted_and_the_next_one_follows(tab: Tab, server: RunningServer) -> None:
    tab.page.fill("#chat-line", "a long one")
    tab.page.keyboard.press("Enter")
    tab.until("() => document.getElementById('chat-log').textContent.includes('word word')")
    tab.page.keyboard.press("Escape")
    tab.until("() => document.getElementById('chat-log').textContent.includes('stopped')")
    tab.page.fill("#chat-line", "hello")
    tab.page.keyboard.press("Enter")
    tab.until("() => document.getElementById('chat-log').textContent.includes('You said: hello')")
    tab.until("() => /tok.s · first after/.test(document.getElementById('chat-log').textContent)")
    assert server.settled()


def test_an_answer_is_redirected_while_it_comes(tab: Tab) -> None:
    tab.page.fill("#chat-line", "a long one")
    tab.page.keyboard.press("Enter")
    tab.until("() => document.getElementById('chat-log').textContent.includes('word word')")
    assert tab.page.inner_text("#chat-send") == "Redirect"
    tab.page.fill("#chat-line", "be brief")
    tab.page.keyboard.press("Enter")
    tab.until("() => document.getElementById('chat-log').textContent.includes('You said: be brief')")
    tab.until("() => document.getElementById('chat-send').textContent === 'Send'")


def test_two_models_race_on_one_prompt(tab: Tab) -> None:
    tab.page.click("#tab-race")
    tab.until("() => document.querySelectorAll('#race-model-a option').length === 2")
    assert tab.page.input_value("#race-model-a") != tab.page.input_value("#race-model-b")
    tab.page.fill("#race-line", "go")
    tab.page.keyboard.press("Enter")
    tab.until(
        "() => document.getElementById('race-stop').hidden"
        " && /tok/.test(document.getElementById('race-note-a').textContent)"
    )
    assert tab.page.inner_text("#race-out-a") == tab.page.inner_text("#race-out-b") == "You said: go"
    notes = tab.page.inner_text("#race-note-a"), tab.page.inner_text("#race-note-b")
    assert sum(note.startswith("first") for note in notes) == 1


def test_a_lost_connection_comes_back_with_the_text(chrome: Browser) -> None:
    def lost(text: str) -> bool:
        return "ERR_CONNECTION" in text or "WebSocket connection" in text or "ERR_EMPTY" in text

    with serving(scripted_model(answers, step_cost=0.01)) as first:
        port = first.port
        tab_of = visiting(chrome, first, forgiving=lost)
        tab = tab_of.__enter__()
        tab.connected()
        tab.page.fill("#chat-line", "a long one")
        tab.page.keyboard.press("Enter")
        tab.until("() => document.getElementById('chat-log').textContent.includes('word word')")
        tab.write("kept.py", "total = 0\n")
    tab.page.wait_for_selector("#state[data-state=lost]")
    tab.page.keyboard.type("value =")  # typed while nobody listens
    with serving(scripted_model(answers), port=port):
        tab.connected()
        tab.page.keyboard.type(" ")
        assert tab.ghost() == "total + 1"
        assert tab.text() == "total = 0\nvalue = "
        # The answer that broke off stands as far as it came, and the conversation goes on.
        assert "word word" in tab.page.inner_text("#chat-log")
        tab.until("() => document.getElementById('chat-send').textContent === 'Send'")
        tab.page.fill("#chat-line", "hello")
        tab.page.keyboard.press("Enter")
        tab.until("() => document.getElementById('chat-log').textContent.includes('You said: hello')")
        tab_of.__exit__(None, None, None)


def test_two_tabs_do_not_mix(chrome: Browser, server: RunningServer) -> None:
    with visiting(chrome, server) as one, visiting(chrome, server) as other:
        for opened, name in ((one, "one.py"), (other, "other.py")):
            opened.connected()
            opened.write(name, f"# {name}\n")
        one.page.keyboard.type("total = ")
        other.page.keyboard.type("rest = ")
        assert one.ghost() == other.ghost() == "total + 1"
        one.page.keyboard.press("Tab")
        assert one.text() == "# one.py\ntotal = total + 1"
        assert other.text() == "# other.py\nrest = "


def test_two_tabs_of_one_profile_do_not_mix(tab: Tab) -> None:
    tab.write("one.py", "# one.py\n")
    other = Tab(tab.page.context.new_page())
    other.page.goto(tab.page.url)
    other.connected()
    other.write("other.py", "# other.py\n")
    other.page.keyboard.type("rest = ")
    other.ghost()
    tab.page.bring_to_front()
    tab.page.locator(".cm-content").focus()
    tab.page.keyboard.type("total = ")
    assert tab.ghost() == "total + 1"
    tab.page.keyboard.press("Tab")
    assert tab.text() == "# one.py\ntotal = total + 1"
    assert other.text() == "# other.py\nrest = "
    other.page.close()
    tab.page.keyboard.type("\nmore = ")  # the other's end is nothing to this one
    assert tab.ghost() == "total + 1"


@pytest.mark.parametrize(("lines", "shown"), [(3_000, True), (150_000, False)], ids=["100 kB", "5 MB"])
def test_large_files_stay_usable(tab: Tab, lines: int, shown: bool) -> None:
    tab.write("large.py", "".join(f"value_{n:06} = {n:06} + 1  # a line\n" for n in range(lines)))
    tab.page.keyboard.type("value_0 = ")
    if shown:
        tab.ghost()
        tab.page.keyboard.press("Tab")
    else:  # said, not silently missing
        tab.until("() => document.getElementById('silence').textContent.includes('file too large')")
    tab.page.keyboard.type("\n# the end")
    tab.until(
        "() => { const line = [...document.querySelectorAll('.cm-line')].at(-1).cloneNode(true);"
        " line.querySelectorAll('.ghost').forEach(e => e.remove());"
        " return line.textContent === '# the end'; }"
    )
    assert tab.page.locator(".cm-line").count() < 500  # only what is seen is drawn


def test_a_hostile_name_and_content_run_nothing(tab: Tab) -> None:
    name = SCRIPT.replace("/", "") + ".py"
    tab.write(
        name, f"import yaml\nyaml.load({SCRIPT!r}, Loader=yaml.Loader)\n# {SCRIPT}\n</script>\n\u202e\x00"
    )
    tab.page.keyboard.type(SCRIPT)
    tab.page.fill("#chat-line", SCRIPT)
    tab.page.keyboard.press("Enter")
    tab.until("() => document.getElementById('chat-log').textContent.includes('You said: ')")
    assert tab.page.title() == "Keystroke"
    assert tab.page.locator("main img:not(.cm-widgetBuffer), main script").count() == 0


def test_the_browser_runs_and_reaches_only_what_the_policy_allows(
    chrome: Browser, server: RunningServer
) -> None:
    with visiting(chrome, server, forgiving=lambda _text: True) as tab:  # every refusal is a complaint
        tab.connected()
        refused = tab.page.evaluate(
            """async () => {
              const refused = new Set();
              addEventListener("securitypolicyviolation", (e) => refused.add(e.effectiveDirective));
              const tried = (act) => { try { act(); } catch { /* Trusted Types throw */ } };
              const made = (tag, set) => Object.assign(document.createElement(tag), set);
              const add = (tag, set) => tried(() => document.body.append(made(tag, set)));
              add("script", { textContent: "document.title = 'run'" });
              add("style", { textContent: "body { display: none }" });
              add("iframe", { src: "data:text/html,hello" });
              add("base", { href: "http://127.0.0.1:9/" });
              add("div", { innerHTML: "<img src=x onerror=alert()>" });
              tried(() => document.body.setAttribute("onclick", "document.title = 'run'"));
              document.body.click();
              await import("data:text/javascript,document.title='run'").catch(() => 0);
              await fetch("http://127.0.0.1:9/").catch(() => 0);
              await new Promise((done) => setTimeout(done, 100));
              return [...refused].sort();
            }"""
        )
        assert tab.page.title() == "Keystroke"
        assert tab.page.locator("#editor").is_visible()
        wanted = "base-uri connect-src frame-src require-trusted-types-for script-src-elem style-src-elem"
        assert set(wanted.split()) <= set(refused)


def test_characters_beyond_the_basic_plane_keep_their_places(tab: Tab) -> None:
    tab.write("smile.py", "# 😀😀 smile 𝕏\nimport yaml\nyaml.load(open('😀'), Loader=yaml.Loader)\n")
    tab.page.keyboard.type("x = '😀'; total = ")
    assert tab.ghost() == "total + 1"
    tab.page.wait_for_selector("#findings .fix")
    tab.page.locator("#findings .fix").first.click()
    # The line that was begun may be reported as unfinished by then.
    tab.until("() => !document.getElementById('findings').textContent.includes('YAML')")
    assert "yaml.safe_load(open('😀'))" in tab.text() or "Loader=yaml.SafeLoader" in tab.text()


def test_a_key_is_asked_for_and_kept_in_this_tab_only(
    chrome: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "open sesame")

    def refused(text: str) -> bool:
        return "401" in text or "WebSocket connection" in text

    with serving(scripted_model(answers), server=ServerSettings(api_key_env="A_KEY")) as locked:
        with visiting(chrome, locked, forgiving=refused) as tab:
            tab.page.wait_for_selector("#key-dialog[open]")
            tab.page.fill("#key-input", "open sesame")
            tab.page.keyboard.press("Enter")
            tab.connected()
            assert tab.page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [
                1,
                0,
                "",
            ]
        with visiting(chrome, locked, address=f"{locked.url}/#key=open%20sesame", forgiving=refused) as tab:
            tab.connected()
            assert "sesame" not in tab.page.url


def test_the_whole_page_is_used_by_keyboard_alone(tab: Tab) -> None:
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("Tab")  # Escape, then Tab, leaves the editor
    assert not tab.page.evaluate("document.activeElement.closest('.cm-editor') !== null")
    reached = set()
    for _ in range(60):
        reached.add(tab.page.evaluate("document.activeElement.id || document.activeElement.className"))
        tab.page.keyboard.press("Tab")
        if tab.page.evaluate("document.activeElement.closest('.cm-editor') !== null"):
            tab.page.keyboard.press("Escape")
            tab.page.keyboard.press("Tab")
    assert {
        "tab-chat",
        "chat-line",
        "chat-send",
        "file-name",
        "open-button",
        "theme",
        "key-button",
    } <= reached
    tab.page.focus("#tab-chat")
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.locator("#edit").is_visible()
    assert tab.page.locator("#chat").is_hidden()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 375)], ids=["desk", "phone"])
def test_axe_finds_nothing_to_complain_of(
    chrome: Browser, server: RunningServer, scheme: Any, width: int
) -> None:
    axe = files("axe_playwright_python").joinpath("axe.min.js").read_text()
    with visiting(chrome, server, color_scheme=scheme, viewport={"width": width, "height": 800}) as tab:
        tab.connected()
        tab.write("load.py", "import yaml\nyaml.load(a, Loader=yaml.Loader)\n")
        tab.page.wait_for_selector("#findings .fix")
        tab.page.keyboard.type("total = ")
        tab.ghost()
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
        tab.page.evaluate(axe)
        for panel in ("chat", "edit", "tasks", "race"):
            tab.page.click(f"#tab-{panel}")
            found = tab.page.evaluate("axe.run({resultTypes: ['violations']})")
            told = [(v["id"], [n["target"] for n in v["nodes"]][:3]) for v in found["violations"]]
            assert told == [], panel


def test_the_theme_is_changed_and_remembered(tab: Tab) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    before = tab.page.evaluate(ground)
    tab.page.click("#theme")
    after = tab.page.evaluate(ground)
    assert before != after
    tab.page.reload()
    assert tab.page.evaluate(ground) == after


def test_a_revoked_connection_leaves_nothing_running(chrome: Browser, server: RunningServer) -> None:
    with visiting(chrome, server) as tab:
        tab.connected()
        tab.page.fill("#chat-line", "a long one")
        tab.page.keyboard.press("Enter")
        tab.until("() => document.getElementById('chat-log').textContent.includes('word word')")
    deadline = time.monotonic() + 60
    while not server.settled(1.0) and time.monotonic() < deadline:
        pass
    assert server.settled()


BROKEN = "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a + b\n"
FIXED = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"


def test_a_task_is_approved_by_hunk_and_undone(chrome: Browser, tmp_path: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    (root / "calc.py").write_text(BROKEN)
    model = scripted_model(lambda prompt: f"{FIXED}```\n", "worker")
    with serving(model, folder=tmp_path / "state") as server, visiting(chrome, server) as tab:
        tab.connected()
        tab.page.click("#tab-tasks")
        tab.page.fill("#task-folder", str(root))
        tab.page.fill("#task-line", "make add in calc.py add")
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_selector("#task-hunks .hunk")
        assert tab.page.locator("#task-hunks .hunk").count() == 2
        assert (root / "calc.py").read_text() == BROKEN
        tab.page.uncheck("[data-hunk='1']")
        tab.page.click("#task-yes")
        tab.page.wait_for_selector("#task-undo", state="visible")
        assert (root / "calc.py").read_text() == BROKEN.replace("a - b", "a + b", 1)
        tab.page.click("#task-undo")
        tab.until("() => document.getElementById('task-note').textContent.startsWith('undone')")
        assert (root / "calc.py").read_text() == BROKEN


def test_a_task_is_steered_and_stopped(chrome: Browser, tmp_path: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    (root / "calc.py").write_text(BROKEN)
    model = scripted_model(lambda prompt: BROKEN * 200, "worker", step_cost=0.005)
    with serving(model, folder=tmp_path / "state") as server, visiting(chrome, server) as tab:
        tab.connected()
        tab.page.click("#tab-tasks")
        tab.page.fill("#task-folder", str(root))
        tab.page.fill("#task-line", "make add in calc.py add")
        tab.page.keyboard.press("Enter")
        tab.until("() => document.getElementById('task-log').textContent.includes('rewrite')")
        tab.page.fill("#task-line", "and nothing else")
        tab.page.keyboard.press("Enter")
        tab.until("() => document.getElementById('task-log').textContent.includes('You: and nothing else')")
        tab.page.keyboard.press("Escape")
        tab.until("() => document.getElementById('task-note').textContent.startsWith('interrupted')")
        assert (root / "calc.py").read_text() == BROKEN
        assert server.settled()


def test_a_long_line_wraps_and_none_of_it_lies_under_the_line_numbers(tab: Tab) -> None:
    tab.write("long.py", "first = " + " + ".join(f"name_{n}" for n in range(120)) + "\nlast = 1\n")
    box = tab.page.evaluate(
        """() => { const s = document.querySelector('.cm-scroller'), l = document.querySelector('.cm-line');
        const g = document.querySelector('.cm-gutters');
        return { wide: s.scrollWidth - s.clientWidth, left: l.getBoundingClientRect().left,
                 gutter: g.getBoundingClientRect().right, high: l.getBoundingClientRect().height }; }"""
    )
    assert box["wide"] <= 1
    assert box["left"] >= box["gutter"] - 1
    assert box["high"] > 30


def test_an_empty_chat_offers_three_things_to_try_and_new_brings_them_back(tab: Tab) -> None:
    ideas = tab.page.locator("#chat-log .welcome button")
    assert ideas.count() == 3
    ideas.first.click()
    tab.page.wait_for_selector("#chat-log article.assistant p.note")
    assert tab.page.locator("#chat-log .welcome").count() == 0
    assert "Explain what this file does." in tab.page.inner_text("#chat-log article.user")
    tab.page.click("#chat-reset")
    assert ideas.count() == 3


def test_tasks_and_the_race_say_in_one_sentence_what_they_are(tab: Tab) -> None:
    tab.page.click("#tab-race")
    assert "compare two models" in tab.page.inner_text("#race-form .note")
    assert "several attempts" in str(tab.page.text_content("#task-form .note"))


def test_a_narrow_dark_screen_has_everything_and_scrolls_only_down(
    chrome: Browser, server: RunningServer
) -> None:
    context: dict[str, Any] = {"viewport": {"width": 360, "height": 640}, "color_scheme": "dark"}
    with visiting(chrome, server, **context) as narrow:
        narrow.connected()
        page = narrow.page
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        for part in ("#editor", "#chat-line", "#tab-race"):
            page.locator(part).scroll_into_view_if_needed()
            assert page.locator(part).is_visible()
        shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert sum(int(part) for part in re.findall(r"\d+", shade)[:3]) < 200
