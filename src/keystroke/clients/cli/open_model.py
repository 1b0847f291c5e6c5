"""Opens the model that a command uses, by name, with the settings and the options of the command line.

A name is a `[models.NAME]` table, a model of the library, a path, or URL#MODEL. A server is used only where
the user names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keystroke.errors import ConfigError

if TYPE_CHECKING:
    from keystroke.agent.chat.model import CompletionModel
    from keystroke.agent.chat.receipt import Price
    from keystroke.clients.cli.options import Invocation
    from keystroke.config import Settings
    from keystroke.engine.generation import GenerationParams
    from keystroke.engine.remote import Endpoint


def open_model(name: str | None, run: Invocation, *, local: bool = False) -> CompletionModel:
    """The model called `name`. A local model answers through the gateway that all commands share, unless
    `local` or the user's options say otherwise. Raises NotFound, ConfigError or UnsupportedModel."""
    settings = run.settings
    name = name or settings.model.default
    if (remote := _remote(name, settings)) is not None:
        from keystroke.agent.chat.remote import RemoteChatModel
        from keystroke.engine.remote import BlockingModel, RemoteModel

        shown, endpoint, served_name = remote
        server = BlockingModel(RemoteModel(endpoint, served_name))
        return RemoteChatModel(server, name=shown, price=_price(name, settings))
    if run.uses_shared_gateway and not local and (shared := _open_shared_model(name, run)) is not None:
        return shared
    from keystroke.agent.chat.local import LocalChatModel
    from keystroke.engine.load import load_model

    with run.console.progress() as progress:
        return LocalChatModel(
            load_model(name, settings, progress),
            price=_price(name, settings),
            speculate=settings.speculation.enabled,
            owns_model=True,
            show_wait=run.console.waiting,
        )


def open_task_model(name: str, run: Invocation) -> CompletionModel:
    """A model for tasks: loaded in this process, because attempts fork sessions. Raises UnsupportedModel
    where it has no chat template."""
    model = open_model(name, run, local=True)
    model.show_wait = None  # the task's own view shows progress
    try:
        model.check_chat()
    except BaseException:
        model.close()
        raise
    return model


def gateway_model(name: str, run: Invocation) -> str | None:
    """The shared gateway's name of a local model, which is loaded there; None where commands do not share a
    gateway, the model is remote, or no gateway can be started."""
    if not run.uses_shared_gateway or _remote(name, run.settings) is not None:
        return None
    return served_name(name, run.settings) if _open_shared_model(name, run) is not None else None


def _open_shared_model(name: str, run: Invocation) -> CompletionModel | None:
    """The model at the shared gateway; None, with a note, where no gateway can be started on this machine."""
    from keystroke.clients.cli.gateway_model import GatewayChatModel, NoGateway
    from keystroke.clients.cli.shared_gateway import shared_gateway

    try:
        return GatewayChatModel(name, served_name(name, run.settings), shared_gateway(run), run.console)
    except NoGateway as error:
        run.console.note(f"{str(error).rstrip('.')}; the model is loaded here instead")
        return None


def served_name(name: str, settings: Settings) -> str:
    """The gateway's name of a model. The gateway has another working folder, so a path is made absolute."""
    from keystroke.engine.builtin import BUILT_IN
    from keystroke.engine.library import EMBEDDED, ModelLibrary

    known = name in settings.models or name == EMBEDDED or name in BUILT_IN
    if known or name in ModelLibrary(settings.paths.models).names():
        return name
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def chat_model(name: str | None, run: Invocation) -> str:
    """The model to talk with: the one named, else the one configured for chat. Raises NotFound."""
    if name is not None:
        return name
    from keystroke.engine.roles import Role, require_model

    return require_model(Role.CHAT, run.settings)


def generation_params(
    settings: Settings,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
) -> GenerationParams:
    """The settings, overridden by options of the command line."""
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
    """Name, endpoint and the server's own name of a remote model; None for a local one."""
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


def _endpoint(url: str, key: str | None, timeout: float) -> Endpoint:
    from keystroke.engine.remote import Endpoint  # here: a local model need not load an HTTP client

    return Endpoint(url, key, first_token_timeout=timeout)


def _price(name: str, settings: Settings) -> Price:
    from keystroke.agent.chat.receipt import Price

    table = settings.models.get(name)
    return Price() if table is None else Price.of(table)
