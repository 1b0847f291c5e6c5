"""A larger model speaks of the ghost text in the playground: calmly, and never under a finger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from page_support import Tab, browser, needs_browser, scripted_model, serving, visiting

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_browser, pytest.mark.browser]

Room = Callable[[str, str], AbstractContextManager[Tab]]


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def room(chrome: Browser) -> Room:
    """A tab where the small model answers with one text and the larger one with another."""

    @contextmanager
    def opened(small: str, large: str) -> Iterator[Tab]:
        def answer(text: str) -> Callable[[str], str]:
            return lambda prompt: "\n" if "total = 7" in prompt else text

        first, second = (
            scripted_model(answer(small), name="small"),
            scripted_model(answer(large), name="large"),
        )
        assert first.fim is not None
        models = [replace(m, fim=replace(first.fim, order="spm")) for m in (first, second)]
        with serving(*models, roles={"large": "deep"}) as server, visiting(chrome, server) as tab:
            tab.connected()
            tab.write("sum.py", "left, right = 1, 2\ntotal =")
            yield tab

    return opened


def sure(tab: Tab) -> str:
    tab.page.wait_for_selector(".ghost-sure")
    return "\n".join(tab.page.locator(".ghost").all_inner_texts())


def test_what_it_confirms_stands_firmer_and_does_not_move(room: Room) -> None:
    with room("left\n", "left\n") as tab:
        tab.page.keyboard.type(" ")
        assert tab.ghost() == "left"
        place = None
        while place is None:  # what is confirmed meanwhile is drawn anew
            place = tab.page.locator(".ghost").bounding_box()
        assert sure(tab) == "left"
        assert tab.page.locator(".ghost").bounding_box() == place
        assert tab.page.locator(".ghost-changed").count() == 0  # nothing fades where nothing changed
        assert tab.page.inner_text("#silence") == "confirmed by large"


def test_what_it_lengthens_goes_on_and_is_typed_through(room: Room) -> None:
    with room("left\n", "left + right\n") as tab:
        tab.page.keyboard.type(" ")
        assert sure(tab) == "left + right"
        tab.page.keyboard.type("le")
        assert tab.ghost() == "ft + right"
        assert tab.page.locator(".ghost-changed").count() == 0  # a key makes nothing fade again
        tab.page.keyboard.press("Tab")
        assert tab.text().endswith("total = left + right")


def test_tab_in_the_moment_of_the_change_takes_what_was_seen(room: Room) -> None:
    with room("left\n", "right - left\n") as tab:
        tab.page.evaluate(
            """() => new MutationObserver((_, watch) => {
              if (!document.querySelector(".ghost-sure")) return;
              watch.disconnect();
              const key = new KeyboardEvent("keydown", { key: "Tab", code: "Tab", keyCode: 9, bubbles: true, cancelable: true });
              document.querySelector(".cm-content").dispatchEvent(key);
            }).observe(document.querySelector(".cm-content"), { childList: true, subtree: true })"""  # noqa: E501
        )
        tab.page.keyboard.type(" ")
        tab.until("() => document.querySelector('.cm-content').textContent.includes('total = left')")
        assert "right - left" not in tab.text()


def test_what_it_says_of_a_text_that_moved_on_is_not_shown(room: Room) -> None:
    with room("left\n", "left + right\n") as tab:
        tab.page.keyboard.type(" ")
        tab.ghost()
        tab.page.keyboard.type("7")
        tab.page.wait_for_timeout(600)  # the larger one begins after 120 ms without a key
        assert tab.page.locator(".ghost").count() == 0
        assert tab.text().endswith("total = 7")
