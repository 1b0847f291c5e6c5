"""Whose announcement is believed: that of a gateway which runs what is installed now."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.local_gateway import LocalGateway, ServeCommand, read_announcement
from keystroke.gateway.sharing import announce

URL = "http://127.0.0.1:9"


@pytest.fixture
def installed() -> list[str]:
    """The state of the program on the disk; the last one counts."""
    return ["one"]


@pytest.fixture
def command(installed: list[str]) -> ServeCommand:
    return ServeCommand((), {}, "KEY", ("0.1.0", "settings"), lambda: installed[-1])


def file(command: ServeCommand, state: Path, program: str) -> Path:
    return state / "gateways" / f"{command.name(program)}.json"


def test_a_gateway_is_found_as_long_as_the_program_is_the_one_it_was_started_from(
    command: ServeCommand, installed: list[str], tmp_path: Path
) -> None:
    finder = LocalGateway(command, tmp_path)
    announce(file(command, tmp_path, "one"), URL, "key", "0.1.0", "one")
    assert finder.announced_address() == GatewayAddress(URL, "key")
    installed.append("two")
    assert finder.announced_address() is None
    announce(file(command, tmp_path, "two"), URL, "other", "0.1.0", "two")
    assert finder.announced_address() == GatewayAddress(URL, "other")
    installed.append("one")
    assert finder.announced_address() == GatewayAddress(URL, "key")


def test_a_gateway_that_was_started_while_the_program_was_replaced_is_not_taken_for_the_one_of_before(
    command: ServeCommand, tmp_path: Path
) -> None:
    announce(file(command, tmp_path, "one"), URL, "key", "0.1.0", "two")
    assert LocalGateway(command, tmp_path).announced_address() is None


def test_a_gateway_that_does_not_say_what_it_runs_is_read_and_not_used(
    command: ServeCommand, tmp_path: Path
) -> None:
    place = file(command, tmp_path, "one")
    place.parent.mkdir()
    place.write_text(json.dumps({"url": URL, "pid": os.getpid(), "token": "key", "version": "0.1.0"}))
    said = read_announcement(place)
    assert said is not None
    assert (said.url, said.pid, said.version, said.program) == (URL, os.getpid(), "0.1.0", "")
    assert LocalGateway(command, tmp_path).announced_address() is None
