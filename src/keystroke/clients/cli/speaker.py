"""Which model a command talks to: opened by its name, with the settings and what the command line says.

A name is a table of the settings, a model of the library, a path, or URL#MODEL; whoever asks gets a
Speaker and never learns which kind it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keystroke.errors import ConfigError

if TYPE_CHECKING:
    from keystroke.clients.cli.answering import Speaker
    from keystroke.clients.cli.invocation import Invocation
    from keystroke.config import Settings
    from keystroke.engine.generation import GenerationParams
    from keystroke.engine.remote import Endpoint


def open_speaker(name: str | None, run: Invocation, *, local: bool = False) -> Speaker:
    """The model called `name`: a `[models.NAME]` table, a name of the library, a path, or URL#MODEL. One of
    this machine answers through the gateway that all commands share, unless `local` or the user says
    otherwise."""
    settings = run.settings
    name = name or settings.model.default
    if (remote := _remote(name, settings)) is not None:
        from keystroke.clients.cli.remote_speaker import RemoteSpeaker

        return RemoteSpeaker(*remote)
    if run.shares and not local and (shared := _shared(name, run)) is not None:
        return shared
    from keystroke.clients.cli.local_speaker import LocalSpeaker

    with run.console.progress() as progress:
        return LocalSpeaker.load(name, run, progress)


def gateway_model(name: str, run: Invocation) -> str | None:
    """What the shared gateway calls a model of this machine, loaded there; None where tasks are not shared,
    the model is elsewhere, or no gateway can be had."""
    if not run.shares or _remote(name, run.settings) is not None or _shared(name, run) is None:
        return None
    return _asked(name, run.settings)


def _shared(name: str, run: Invocation) -> Speaker | None:
    """The model at the shared gateway; None, and a remark, where there cannot be one on this machine."""
    from keystroke.clients.cli.gateway_speaker import GatewaySpeaker, NoGateway
    from keystroke.clients.cli.shared import shared_gateway

    try:
        return GatewaySpeaker(name, _asked(name, run.settings), shared_gateway(run), run.console)
    except NoGateway as error:
        run.console.note(f"{str(error).rstrip('.')}; the model is loaded here instead")
        return None


def _asked(name: str, settings: Settings) -> str:
    """What the gateway is to call the model: it has a working folder of its own, so a path is made whole."""
    from keystroke.engine.builtin import BUILT_IN
    from keystroke.engine.library import EMBEDDED, Library

    known = name in settings.models or name == EMBEDDED or name in BUILT_IN
    if known or name in Library(settings.paths.models).names():
        return name
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def chat_model(name: str | None, run: Invocation) -> str:
    """The model to talk with: the one named, else the one that has that role. NotFound says how to get
    one."""
    if name is not None:
        return name
    from keystroke.engine.roles import Role, required

    return required(Role.CHAT, run.settings)


def params(
    settings: Settings,
    *,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    stop: Sequence[str] = (),
) -> GenerationParams:
    """Settings, and what the command line says instead."""
    from keystroke.engine.base import Sampling
    from keystroke.engine.generation import GenerationParams

    chosen = settings.generation
    limit = chosen.max_tokens if max_tokens is None else max_tokens
    sampling = Sampling(
        temperature=chosen.temperature if temperature is None else temperature,
        top_k=chosen.top_k,
        top_p=chosen.top_p,
        min_p=chosen.min_p,
        seed=chosen.seed if seed is None else seed,
    )
    return GenerationParams(max_tokens=limit or None, sampling=sampling, stop=tuple(stop))


def _remote(name: str, settings: Settings) -> tuple[str, Endpoint, str] | None:
    """Name, endpoint and the server's own name of a remote model; None for one on this machine."""
    shared = settings.remote
    if name.startswith(("http://", "https://")):
        url, _, model = name.partition("#")
        if not model:
            raise ConfigError(f"write the model's name after the address, like {url}#MODEL", param="model")
        return model, _endpoint(url, shared.api_key_env, shared.timeout_s), model
    table = settings.models.get(name)
    if table is not None and (table.engine == "remote" or table.base_url):
        url = table.base_url or shared.base_url or ""
        key = table.api_key_env or shared.api_key_env
        return name, _endpoint(url, key, shared.timeout_s), table.model or ""
    if settings.engine.kind == "remote" and name == settings.model.default:
        if not shared.base_url or not shared.model:
            raise ConfigError(
                "engine.kind is remote, but remote.base_url or remote.model is not set; set both"
            )
        return shared.model, _endpoint(shared.base_url, shared.api_key_env, shared.timeout_s), shared.model
    return None


def _endpoint(url: str, key: str | None, patience: float) -> Endpoint:
    from keystroke.engine.remote import Endpoint  # here: a local model need not load an HTTP client

    return Endpoint(url, key, first_token_timeout=patience)
