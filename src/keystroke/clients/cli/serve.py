"""`keystroke serve`: runs the gateway in this process until it is interrupted.

Invalid options and settings are reported before the first model is loaded.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.options import Invocation, invocation_of, option
from keystroke.errors import ConfigError

if TYPE_CHECKING:
    from keystroke.config import Settings
    from keystroke.gateway.work.registry import ModelRegistry


OLLAMA_PORT = 11434


def serve(
    ctx: typer.Context,
    host: options.Host = None,
    port: options.Port = None,
    model: Annotated[
        list[str] | None,
        option(
            "--model",
            "-m",
            "Serve this model; may be repeated. Default: the configured ones.",
            metavar="MODEL",
        ),
    ] = None,
    engine: Annotated[
        str | None, option("Backend for local models: auto, onnx or cuda.", metavar="KIND")
    ] = None,
    draft_model: Annotated[
        str | None,
        option("A smaller model with the same vocabulary, for speculative decoding.", metavar="MODEL"),
    ] = None,
    certificate: Annotated[
        str | None,
        option("--tls-certificate", "Serve HTTPS with this PEM certificate chain.", metavar="FILE"),
    ] = None,
    private_key: Annotated[
        str | None, option("--tls-key", "The certificate's private key.", metavar="FILE")
    ] = None,
    origins: Annotated[
        list[str] | None,
        option("--allow-origin", "Allow browser pages from this origin; may be repeated.", metavar="ORIGIN"),
    ] = None,
    echo: Annotated[
        bool,
        option("--echo", "--fake", "Serve a model that echoes its input, to test a client without weights."),
    ] = False,
    ollama: Annotated[
        bool, option("--ollama", "Also listen on port 11434, where clients of Ollama look.")
    ] = False,
    idle_exit: Annotated[
        float | None, option("Exit this long after the last client disconnects.", metavar="SECONDS", min=0)
    ] = None,
    announcement: Annotated[Path | None, typer.Option("--announce", metavar="FILE", hidden=True)] = None,
) -> None:
    from keystroke.clients.cli.fingerprint import fingerprint
    from keystroke.clients.cli.installed_version import release

    # Taken first: if the program is upgraded during start-up, this process must count as the old one.
    program = fingerprint() if announcement is not None else ""
    run = invocation_of(ctx)
    if not echo and run.settings.engine.kind in ("auto", "onnx") and run.settings.engine.kernels == "auto":
        from keystroke.engine.onnx.native import start_compiling

        start_compiling(run.settings.paths.cache)  # while the modules below are imported
    from keystroke.gateway.access.security import is_loopback, static_keys
    from keystroke.gateway.app import Gateway, check_exposure, run_server
    from keystroke.gateway.record.store import open_store
    from keystroke.gateway.sharing import IdleShutdown, announce, withdraw

    settings = run.settings_with(
        {
            "engine.kind": engine,
            "speculation.draft_model": draft_model,
            "server.host": host,
            "server.port": port,
            "server.ollama_port": OLLAMA_PORT if ollama else None,
            "server.tls_certificate": certificate,
            "server.tls_key": private_key,
            "server.origins": origins,
        }
    )
    if announcement is not None:  # clients on this machine connect to loopback, which has no certificate
        plain = dataclasses.replace(settings.server, tls_certificate=None, tls_key=None, ollama_port=0)
        settings = dataclasses.replace(settings, server=plain)
    server = settings.server
    if (server.tls_certificate is None) != (server.tls_key is None):
        raise ConfigError("TLS needs both a certificate and its key; give --tls-certificate and --tls-key")
    for file in (server.tls_certificate, server.tls_key):
        if file is not None and not file.is_file():
            raise ConfigError(f"{file} does not exist; check the TLS options")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    store = open_store(settings)
    try:
        check_exposure(server, store.keys())
        registry = _registry(run, settings, model, echo, shared=announcement is not None)
        gateway = Gateway(registry, settings, store=store)
    except BaseException:
        store.close()
        raise
    scheme = "https" if server.tls_certificate else "http"
    if scheme == "http" and not is_loopback(server.host):
        run.console.note(
            f"warning: {server.host} receives keys and code without encryption; "
            "give --tls-certificate and --tls-key, or use a proxy that terminates TLS"
        )
    editors = None
    if idle_exit is not None:
        editors = IdleShutdown(gateway, idle_exit, lambda: signal.raise_signal(signal.SIGINT))

    def ready(listening: int) -> None:
        address = f"{scheme}://{server.host}:{listening}"
        if editors is not None:
            editors.start()
        if announcement is not None:
            token = next(iter(static_keys(server, run.environ)), None)
            announce(announcement, address, token, release(), program)
        names = list(gateway.service.registry.entries)
        also = f"; Ollama's clients: {server.host}:{server.ollama_port}" if server.ollama_port else ""
        run.report(
            {"url": address, "models": names},
            f"serving {', '.join(names)} at {address} (OpenAI base URL: {address}/v1{also}); Ctrl-C stops",
        )

    def draining(answers: int) -> None:
        run.console.note(
            f"finishing {answers} answer{'s' if answers > 1 else ''}, {server.drain_s:g} s at most; "
            "Ctrl-C again stops at once"
        )

    try:
        run_server(gateway, on_ready=ready, on_drain=draining)
    finally:
        if announcement is not None:
            withdraw(announcement)


def _registry(
    run: Invocation, settings: Settings, models: list[str] | None, echo: bool, *, shared: bool
) -> ModelRegistry:
    """`shared`: the gateway of this machine's commands, which may request any model."""
    from keystroke.config import NamedModel
    from keystroke.gateway.work.registry import ModelRegistry, local_entry, registry_from_settings

    if echo:
        from keystroke.engine.echo_model import echo_model

        return ModelRegistry([local_entry("echo", echo_model(), named=NamedModel(concurrent=8))])
    if models:
        tables = {name: settings.models.get(name, NamedModel()) for name in models}
        first = dataclasses.replace(settings.model, default=models[0])
        settings = dataclasses.replace(settings, model=first, models=tables)
    with run.console.progress(log=shared) as progress:
        return registry_from_settings(settings, progress, roles=not models, open_ended=shared)
