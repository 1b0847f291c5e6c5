"""`keystroke doctor`: reports on this machine, its models and their speed.

Measures for about two seconds and changes nothing but caches. The command fails only if the model cannot be
used; anything else that is missing is a line of the report.
"""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.console import format_count, format_size
from keystroke.clients.cli.installed_version import release
from keystroke.clients.cli.open_model import open_model
from keystroke.clients.cli.options import Invocation, invocation_of, option
from keystroke.clients.gateway_address import GatewayAddress
from keystroke.config import Settings
from keystroke.engine.backends import BACKENDS
from keystroke.engine.builtin import BUILT_IN, stated_parameters
from keystroke.engine.cores import usable_cores
from keystroke.engine.machine import fit, look_up_machine, processor_name
from keystroke.engine.memory import available_bytes, total_memory
from keystroke.engine.unsupported_gpu import unsupported_gpu
from keystroke.errors import KeystrokeError

if TYPE_CHECKING:
    from keystroke.agent.chat.model import CompletionModel

PACKAGES = ("onnxruntime", "onnx", "numpy", "tokenizers", "gguf", "mlx", "torch")


def doctor(
    ctx: typer.Context,
    model: options.Model = None,
    quick: Annotated[bool, option("--quick", "Do not load a model or measure its speed.")] = False,
    json: options.Json = False,
) -> None:
    from keystroke.engine.fetch.staging import folder_bytes

    run = invocation_of(ctx)
    settings = run.settings
    box = look_up_machine(settings.paths.models, measure=not quick)
    facts: dict[str, Any] = {
        "keystroke": release(),
        "machine": machine(),
        "packages": packages(),
        "gpu": box.gpu and f"{box.gpu.name}, {box.gpu.memory_bytes >> 20} MiB, {box.gpu.driver}",
        "other_gpu": unsupported_gpu(),
        "backends": {name: backend.unavailable_reason() for name, backend in BACKENDS.items()},
    }
    facts["folders"] = {
        name: {"path": str(path), "bytes": folder_bytes(path)}
        for name, path in (("models", settings.paths.models), ("cache", settings.paths.cache))
    }
    facts["fits"] = {model.name: fit(model, box, installed=True).describe() for model in BUILT_IN.values()}
    facts["gateways"] = gateways(settings.paths.state)
    if facts["gpu"] is not None or settings.engine.kind == "cuda":
        from keystroke.engine.cuda.backend import report

        suits, why = report(model or settings.model.default, settings)
        facts["cuda"] = {"suits": suits, "why": why}
    problem: KeystrokeError | None = None
    if not quick:
        try:
            facts["model"] = examine(model, run)
        except KeystrokeError as error:
            problem = error
            facts["model"] = {"name": model or settings.model.default, "error": str(error)}
        if facts["model"].get("precision") == "stored":
            facts["kernels"] = kernels(settings)
    if run.json:
        run.console.json(facts)
    else:
        _print(run, facts)
    if problem is not None:
        raise problem


def machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor_name(),
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "memory_bytes": total_memory(),
        "free_bytes": available_bytes(),
        "python": platform.python_version(),
    }


def packages() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def kernels(settings: Settings) -> str:
    """Which kernels multiply stored weights, and why not faster ones."""
    from keystroke.engine.onnx.native import unavailable_reason

    if settings.engine.kernels == "portable":
        return "portable (set by engine.kernels)"
    reason = unavailable_reason(settings.paths.cache)
    return f"portable: {reason}" if reason else "compiled for this processor"


def gateways(state: Path) -> list[dict[str, Any]]:
    """The shared gateways of this user and the models each has loaded."""
    import msgspec

    from keystroke.clients.cli.fingerprint import fingerprint
    from keystroke.clients.gateway_http import GatewayHttp
    from keystroke.clients.local_gateway import running_gateways

    found: list[dict[str, Any]] = []
    program = fingerprint()
    for one in running_gateways(state):
        record: dict[str, Any] = {"pid": one.pid, "url": one.url, "version": one.version}
        record["current"] = one.program == program
        try:
            status = GatewayHttp(GatewayAddress(one.url, one.token)).status()
        except KeystrokeError as error:
            record |= {"models": [], "error": str(error)}
        else:
            record["models"] = [msgspec.structs.asdict(model) for model in status.models]
        found.append(record)
    return found


def examine(name: str | None, run: Invocation) -> dict[str, Any]:
    with open_model(name, run, local=True) as opened:  # its own: speed is measured on an engine of one's own
        return _examine_model(opened)


def _examine_model(opened: CompletionModel) -> dict[str, Any]:
    from keystroke.agent.chat.local import LocalChatModel
    from keystroke.agent.chat.remote import RemoteChatModel

    if isinstance(opened, RemoteChatModel):
        health = opened.server.probe()
        found: dict[str, Any] = {"name": opened.name, "server": opened.server.model.endpoint.base_url}
        found |= {"ok": health.ok, "answer_ms": round(health.seconds * 1000, 1)}
        return found | ({"error": health.detail} if health.detail else {})
    assert isinstance(opened, LocalChatModel)
    from keystroke.clients.cli.measure import measure

    engine, model = opened.model.engine, opened.model
    speed = measure(engine)
    info = engine.info
    return {
        "name": opened.name,
        "engine": type(engine).__name__,
        "architecture": info.architecture,
        "parameters": info.parameters,
        "precision": info.precision,
        "weight_bytes": info.weight_bytes,
        "context": info.context_length,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "chat": model.chat is not None,
        "fill_in_the_middle": model.fim.order if model.fim is not None else None,
        "speed": asdict(speed),
        "cached_bytes": engine.stats().cached_bytes,
    }


def _print(run: Invocation, facts: dict[str, Any]) -> None:
    box, out = facts["machine"], run.console

    def row(label: str, text: str) -> None:
        out.line(f"{label:12}{text}")

    row("keystroke", f"{facts['keystroke']} on Python {box['python']}")
    row("machine", ", ".join(dict.fromkeys((box["processor"], box["architecture"], box["system"]))))
    free = f", {format_size(box['free_bytes'])} free" if box["free_bytes"] else ""
    row("cores", f"{box['cores']} usable; memory {format_size(box['memory_bytes'])}{free}")
    row("packages", ", ".join(f"{name} {v}" for name, v in facts["packages"].items() if v))
    row("gpu", facts["gpu"] or facts["other_gpu"] or "none found")
    row("engines", ", ".join(name for name, reason in facts["backends"].items() if reason is None) or "none")
    for at, (name, words) in enumerate(facts["fits"].items()):
        row("" if at else "fits", f"{name}: {words}")
    if "cuda" in facts:
        row("cuda", ("usable: " if facts["cuda"]["suits"] else "not usable: ") + facts["cuda"]["why"])
    for name, folder in facts["folders"].items():
        row(name, f"{format_size(folder['bytes'])} of files in {folder['path']}")
    for label, text in _gateway_rows(facts["gateways"]):
        row(label, text)
    model = facts.get("model")
    if model is None:
        return
    if "server" in model:
        state = (
            f"answers in {model['answer_ms']} ms" if model["ok"] else model.get("error", "does not answer")
        )
        row("model", f"{model['name']} at {model['server']}: {state}")
    elif "speed" in model:
        speed = model["speed"]
        row(
            "model",
            f"{model['name']}: {model['architecture']}, "
            f"{stated_parameters(model['name'], model['parameters']) / 1e6:,.0f} M parameters",
        )
        row(
            "engine",
            f"{model['engine']}, {model['precision']}, {format_size(model['weight_bytes'])} of weights",
        )
        if "kernels" in facts:
            row("kernels", facts["kernels"])
        kv = f"{format_size(model['kv_bytes_per_token'] * 1000)} of memory per 1,000 tokens"
        row("context", f"up to {model['context']:,} tokens, {kv}")
        fim = model["fill_in_the_middle"]
        follows = "follows instructions" if model["chat"] else "completes code; does not follow instructions"
        row("formats", f"{follows}; {'fills in the middle' if fim else 'does not fill in the middle'}")
        row("prefill", f"reads {speed['prefill']:,.0f} tokens of prompt a second")
        row("decode", f"writes {speed['decode']:,.0f} tokens a second ({speed['step_ms']:.1f} ms each)")
        counts, costs = speed["verify"].keys(), (f"{cost:.1f}" for cost in speed["verify"].values())
        row("drafts", f"verifying {', '.join(map(str, counts))} takes {', '.join(costs)} times one token")


def _gateway_rows(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """One line per gateway, followed by one per model."""
    if not found:
        return [("gateway", "not running; the first command that uses a model starts it")]
    rows: list[tuple[str, str]] = []
    for gateway in found:
        where = f"{gateway['url']}, process {gateway['pid']}"
        if not gateway["current"]:
            where += ", started by another installation and not used by new commands"
        rows.append(("gateway", gateway.get("error") or where))
        for model in gateway["models"]:
            text = f"{model['name']} ({model['role']})"
            if model["state"] == "loaded":
                text += f": {model['precision']}, {format_size(model['weight_bytes'])} of weights, "
                text += f"{format_size(model['cached_bytes'] or 0)} of cache"
                if busy := model["running"] + model["waiting"]:
                    text += f", {format_count(busy, 'request')} running or waiting"
            elif model["state"] == "offered":
                text += ": loaded on first use"
            rows.append((model["state"], text))
    return rows
