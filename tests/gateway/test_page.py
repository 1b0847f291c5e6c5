"""The playground as a browser gets it: under a strict policy, from the package, no key in the way of the page
itself and none missing behind it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest
from gateway_support import scripted_model, serving
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from keystroke.config import ServerSettings
from keystroke.gateway.access.security import bearer_from_subprotocols

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "src" / "keystroke" / "gateway" / "page"


def offered(key: str) -> str:
    return f"keystroke.bearer.{base64.urlsafe_b64encode(key.encode()).decode().rstrip('=')}"


def test_the_policy_lets_nothing_run_or_load_but_the_packages_own_files() -> None:
    with serving(scripted_model()) as server:
        first, second = httpx.get(f"{server.url}/"), httpx.get(f"{server.url}/")
    policy = dict(part.strip().split(" ", 1) for part in first.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == policy["img-src"] == "'self'"
    assert re.fullmatch(r"'self' 'nonce-[\w-]{20,}'", policy["style-src"])
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["style-src"] != second.headers["content-security-policy"]
    assert policy["style-src"].split("nonce-")[1].rstrip("'") in first.text  # each visit has its own
    assert first.headers["cache-control"] == "no-store"


def test_the_page_has_no_inline_script_or_style_and_names_no_outside_address() -> None:
    index = (PAGE / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", index)
    for name in ("index.html", "app.css", "app.js"):
        outside = set(re.findall(r"https?://[\w.]+", (PAGE / name).read_text()))
        assert outside <= {"http://www.w3.org"}, name  # the name space of SVG


def test_files_come_packed_once_and_are_not_sent_twice() -> None:
    with serving(scripted_model()) as server, httpx.Client(base_url=server.url) as client:
        packed = client.get("/play/app.js")
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.content == (PAGE / "app.js").read_bytes()
        plain = client.get("/play/app.js", headers={"accept-encoding": "identity"})
        assert plain.content == packed.content
        assert (
            client.get("/play/app.js", headers={"if-none-match": packed.headers["etag"]}).status_code == 304
        )
        assert client.get("/play/app.css").headers["content-type"].startswith("text/css")
        for lost in ("/play/nothing", "/play/../app.py", "/play/%2e%2e%2fapp.py", "/play/index.html"):
            assert client.get(lost).status_code == 404, lost


def test_the_page_needs_no_key_and_everything_behind_it_does() -> None:
    keys = ServerSettings(api_key_env="A_VARIABLE")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("A_VARIABLE", "a secret with spaces/and=more ä")
        with serving(scripted_model(), server=keys) as server:
            assert httpx.get(f"{server.url}/").status_code == 200
            assert httpx.get(f"{server.url}/v1/status").status_code == 401
            live = f"ws://127.0.0.1:{server.port}/v1/live"
            for wrong in ((), ("keystroke",), ("keystroke", offered("wrong")), ("keystroke.bearer.!!",)):
                with pytest.raises(InvalidStatus) as refused:
                    connect(live, subprotocols=list(wrong) or None)  # type: ignore[arg-type]
                assert refused.value.response.status_code == 401
            right = ["keystroke", offered("a secret with spaces/and=more ä")]
            with connect(live, subprotocols=right) as socket:  # type: ignore[arg-type]
                assert socket.subprotocol == "keystroke"  # never the one that holds the key


def test_a_key_offered_as_a_subprotocol_is_read_or_refused() -> None:
    assert bearer_from_subprotocols(["keystroke", offered("ks_1_x")]) == "Bearer ks_1_x"
    assert bearer_from_subprotocols(["keystroke"]) is None
    assert bearer_from_subprotocols(["keystroke.bearer.!!"]) == "Bearer not-a-key"
    assert bearer_from_subprotocols(["keystroke.bearer._w"]) == "Bearer not-a-key"  # not UTF-8


def test_another_name_for_a_loopback_server_gets_no_page() -> None:
    with serving(scripted_model()) as server:
        assert httpx.get(f"{server.url}/", headers={"host": "evil.example"}).status_code == 403


def test_the_built_files_are_those_of_the_sources() -> None:
    """Whoever changes web/ runs `make web`."""
    told = hashlib.sha256()
    for folder in ("src", "static"):
        for file in sorted((ROOT / "web" / folder).iterdir(), key=lambda file: file.name):
            told.update(file.name.encode())
            told.update(file.read_bytes())
    told.update((ROOT / "web" / "package-lock.json").read_bytes())
    assert (PAGE / "sources.sha256").read_text().strip() == told.hexdigest(), "run `make web`"


def test_the_page_is_small() -> None:
    sent = sum(len(gzip.compress((PAGE / name).read_bytes())) for name in ("index.html", "app.css", "app.js"))
    assert sent < 200 * 1024


@pytest.mark.slow
def test_the_wheel_holds_the_page(tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("uv is not installed here")
    made = subprocess.run(
        [str(uv), "build", "--wheel", "--no-build-isolation", "--out-dir", str(tmp_path), str(ROOT)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"a wheel cannot be built here: {made.stderr.strip().splitlines()[-1:]}")
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {f"keystroke/gateway/page/{n}" for n in ("index.html", "app.js", "app.css", "icon.svg")} <= held
