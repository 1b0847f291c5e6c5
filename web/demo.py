"""`make demo`: the animated picture of the README, from the real page with the embedded model.

Nothing is drawn by hand and nothing is rehearsed: a browser types into the playground of a fresh server,
and every frame is what it showed. Frames are taken after each key and shown for as long as they lasted, at
most `LONGEST`: a loaded machine makes a slower picture, not another one.

    python -m web.demo [FILE.gif]
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.browser import FLAGS, chromium, reason_why_not

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT = 960, 600
LONGEST = 900  # ms a frame stays
COLOURS = 64

START = '''import sqlite3


class Inventory:
    """Items by name, kept in a database."""

    def __init__(self, path: str) -> None:
        self.connection = sqlite3.connect(path)

    def find(self, name: str):
        query = "SELECT * FROM items WHERE name = '%s'" % name
        return self.connection.execute(query).fetchall()

'''
TYPED = "    def close(self) -> None:\nself.conn"  # Enter indents


class Film:
    """Frames and how long each stayed."""

    def __init__(self, page: Any) -> None:
        self._page = page
        self.frames: list[bytes] = []
        self.lasted: list[int] = []
        self._last = time.monotonic()

    def shoot(self, stay: int = 0) -> None:
        now = time.monotonic()
        if self.lasted:
            self.lasted[-1] = max(self.lasted[-1], min(LONGEST, round((now - self._last) * 1000)))
        self._last = now
        self.frames.append(self._page.screenshot())
        self.lasted.append(stay)

    def develop(self, path: Path) -> None:
        from PIL import Image

        pictures = [Image.open(io.BytesIO(frame)).convert("RGB") for frame in self.frames]
        palette = pictures[-1].quantize(COLOURS)
        small = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
        self.lasted[-1] = 2500
        lasted = [max(60, ms) for ms in self.lasted]
        small[0].save(path, save_all=True, append_images=small[1:], duration=lasted, loop=0, optimize=True)


def play(page: Any, film: Film) -> None:
    page.wait_for_selector("#state[data-state=open]")
    page.set_input_files(
        "#file", {"name": "inventory.py", "mimeType": "text/plain", "buffer": START.encode()}
    )
    page.locator(".cm-content").focus()
    page.keyboard.press("Control+End")
    page.wait_for_selector("#findings .fix")
    page.wait_for_timeout(1500)
    film.shoot(700)
    for letter in TYPED:
        page.keyboard.press("Enter") if letter == "\n" else page.keyboard.type(letter)
        page.wait_for_timeout(90)
        film.shoot(70)
    page.wait_for_timeout(300)
    film.shoot(900)
    if page.locator(".ghost").count():
        page.keyboard.press("Tab")
        film.shoot(700)
    page.keyboard.press("F8")
    film.shoot(700)
    page.keyboard.press("Alt+Enter")
    page.wait_for_timeout(500)
    film.shoot(1200)
    page.click("#tab-race")
    page.fill("#race-line", "def is_prime(n: int) -> bool:\n    ")
    film.shoot(400)
    page.click("#race-go")
    end = time.monotonic() + 20
    while page.locator("#race-stop").is_visible() and time.monotonic() < end:
        film.shoot(80)
        page.wait_for_timeout(150)
    page.wait_for_timeout(300)
    film.shoot(2500)


def main() -> None:
    if (why := reason_why_not()) is not None:
        sys.exit(why)
    from playwright.sync_api import sync_playwright

    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures" / "playground.gif"
    path.parent.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-m", "keystroke", "--json", "serve", "--port", "0"]
    server = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = json.loads(server.stdout.readline())["url"]
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
            page.goto(url)
            film = Film(page)
            play(page, film)
            browser.close()
        film.develop(path)
        sys.stdout.write(f"{path}: {len(film.frames)} frames, {path.stat().st_size / 1024:.0f} kB\n")
    finally:
        server.terminate()
        server.wait(20)


if __name__ == "__main__":
    main()
