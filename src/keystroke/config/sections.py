"""Declarations of all settings: one frozen class per section.

Each setting is declared once, with its type, range, one line of help, and a default whose comment gives the
reason for it. This module reads neither files nor the environment.
"""

# ruff: noqa: RUF009 - option() is dataclasses.field() with the option's description

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

BACKENDS = (
    "cuda",
    "mlx",
    "onnx",
)  # folders of keystroke.engine; auto uses the first that runs on the machine
ENGINES = ("auto", *BACKENDS, "remote")
PRECISIONS = ("auto", "stored", "int4", "int8", "fp16", "fp32")
KERNELS = ("auto", "portable")
SPARSE = ("off", "auto", "always")
KV_PRECISIONS = ("bf16", "int8")
EXPERTS = ("auto", "gpu", "host")
CUDA_TARGETS = ("auto", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def option(
    default: Any,
    help: str,  # noqa: A002 - the domain's own word
    *,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    guarded: bool = False,
) -> Any:
    """Declare one setting. A callable default is a factory. `guarded`: a project's file may not set it."""
    about = {"help": help, "least": least, "most": most, "choices": choices, "guarded": guarded}
    if callable(default):
        return field(default_factory=default, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    # The embedded model: works offline on any laptop, nothing to download.
    default: str = option(
        "embedded", "model used when none is named: a [models.NAME], a library name or a path"
    )
    # None: a [models.NAME] with that role, else the default if it can chat, else an installed one.
    deep: str | None = option(None, "model that follows instructions: edits, reviews, fixes")
    # None: like deep.
    chat: str | None = option(None, "model for chat; the deep one if left out")
    # auto: as the file stores them, or int8 (int4 if large) on a CPU where a float model would be too slow.
    precision: str = option(
        "auto", "precision of the weights: as stored, or converted to this", choices=PRECISIONS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    # auto: the first of BACKENDS that runs on this machine. Guarded: "remote" would send code away.
    kind: str = option("auto", "which engine runs local models", choices=ENGINES, guarded=True)
    # Physical cores: hyper-threads share the memory bandwidth that decoding waits for.
    threads: int = option(0, "CPU threads; 0 means one per physical core", least=0, most=1024)
    # auto: compiled once for this processor if there is a C compiler, which is twice as fast.
    kernels: str = option(
        "auto", "kernels for stored weights on a CPU; portable compiles nothing", choices=KERNELS
    )
    # None: half of the free memory when a model is loaded; caches are dropped when memory runs short.
    kv_budget_mb: int | None = option(
        None, "memory for KV caches, in MB; left out: half of the free memory", least=16, most=4_000_000
    )
    # Off: prompts would be written to disk. On, a long context is warm after a restart.
    prefix_disk_mb: int = option(
        0, "disk space for prefixes kept across restarts, in MB; 0 keeps none", least=0, guarded=True
    )
    # On: speculation, prefix reuse and forks then give exactly the text of plain decoding, at a cost of about
    # a tenth of the speed.
    exact: bool = option(True, "results never depend on how tokens are batched")
    # 0: what the model was trained for; a smaller figure saves memory.
    context: int = option(0, "context length in tokens; 0 means the model's own", least=0, most=1_048_576)
    # Off: attention reads the whole context.
    sparse: str = option(
        "off",
        "a GPU reads only part of contexts above 16k tokens; auto: where that is proved enough",
        choices=SPARSE,
    )
    # bf16: what the model was trained with. int8 halves the memory and the reads of a long context.
    kv_precision: str = option(
        "bf16", "precision of the KV cache on a GPU; int8 holds twice as much", choices=KV_PRECISIONS
    )
    # auto: on the GPU if all fit beside the KV cache, else as many as fit; the CPU computes the others.
    experts: str = option(
        "auto", "where the experts of a mixture are on a machine with a GPU", choices=EXPERTS
    )
    # None: what is free.
    expert_budget_mb: int | None = option(
        None, "GPU memory for experts, in MB; left out: what is free", least=0, most=4_000_000
    )
    # auto: the GPU of this machine. An older target shows how a model runs on older hardware.
    cuda_target: str = option("auto", "GPU architecture that kernels are compiled for", choices=CUDA_TARGETS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    # Greedy: for code the likeliest token is the best choice, and results are reproducible.
    temperature: float = option(0.0, "0 is greedy; higher is more varied", least=0.0, most=5.0)
    top_p: float = option(
        1.0, "keep the likeliest tokens up to this mass; 1 is off", least=0.000001, most=1.0
    )
    top_k: int = option(0, "keep this many tokens; 0 is off", least=0)
    min_p: float = option(0.0, "drop tokens below this share of the best; 0 is off", least=0.0, most=0.999999)
    # Long enough for a whole function or answer; bounds an answer that repeats itself.
    max_tokens: int = option(
        2048, "longest answer in tokens; 0 means to the end of the context", least=0, most=1_048_576
    )
    # Fixed: the same prompt gives the same answer.
    seed: int = option(0, "seed of the random choice", least=0, most=2**63 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    # On: it never changes the text, only the speed.
    enabled: bool = option(True, "draft tokens and verify them together")
    # None: drafting from the text itself is better and costs nothing. Guarded: it loads another model.
    draft_model: str | None = option(None, "a smaller draft model with the same vocabulary", guarded=True)
    # auto: a draft head found for the model only makes it faster. Guarded: it names a file to load.
    draft_head: str = option("auto", "draft head for a GPU: auto, off, or its folder", guarded=True)


def _data_path(*parts: str) -> Callable[[], Path]:
    return lambda: platformdirs.user_data_path("keystroke", appauthor=False).joinpath(*parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSettings:
    # Data, not cache: the system must not delete models.
    models: Path = option(_data_path("models"), "models on this machine", guarded=True)
    # Converted weights can be regenerated, so the system may delete them.
    cache: Path = option(
        lambda: platformdirs.user_cache_path("keystroke", appauthor=False), "converted models", guarded=True
    )
    # History stays on this machine.
    state: Path = option(
        lambda: platformdirs.user_state_path("keystroke", appauthor=False),
        "undo journal and the server's database",
        guarded=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    # None: nothing leaves the machine until the user names a server.
    base_url: str | None = option(
        None, "OpenAI-compatible server, e.g. http://localhost:8000/v1", guarded=True
    )
    model: str | None = option(None, "model name at that server", guarded=True)
    api_key_env: str = option("OPENAI_API_KEY", "environment variable that holds its key", guarded=True)
    # A long prompt on a busy server may take a minute before its first token.
    timeout_s: float = option(
        120.0, "time without data before a request fails, in seconds", least=0.1, most=3600, guarded=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    # Loopback: listening beyond this machine needs an explicit setting and a key.
    host: str = option("127.0.0.1", "address to listen on", guarded=True)
    # The port that editor plugins for local completion try first.
    port: int = option(8012, "port to listen on; 0 picks a free one", least=0, most=65535, guarded=True)
    # None by default: Ollama itself may run there.
    ollama_port: int = option(
        0, "second port, for clients that look for Ollama; 0: none", least=0, most=65535, guarded=True
    )
    api_key_env: str = option(
        "KEYSTROKE_API_KEY",
        "environment variable that holds the accepted keys, comma separated",
        guarded=True,
    )
    keys_file: Path | None = option(None, "file of accepted keys, one a line", guarded=True)
    # A whole large source file with its context fits in one frame; a gigabyte does not.
    max_frame_bytes: int = option(
        16 << 20, "largest message accepted", least=1024, most=1 << 30, guarded=True
    )
    # A longer queue means waits that users do not accept.
    max_queue: int = option(
        64, "requests waiting for one model before more are refused", least=1, guarded=True
    )
    max_connections: int = option(256, "open connections at a time", least=1, guarded=True)
    # A quarter of all: one key, or one faulty program, leaves room for others.
    max_connections_per_key: int = option(
        64, "open connections of one key at a time; 0 means no limit", least=0, guarded=True
    )
    # About ten thousand long conversations; the oldest responses of a key are deleted first.
    stored_mb_per_key: int = option(
        1024, "disk space for one key's responses, in MB; 0 means no limit", least=0, guarded=True
    )
    # None: plain HTTP, which is right for loopback and behind a proxy that ends TLS.
    tls_certificate: Path | None = option(None, "PEM certificate chain; serve HTTPS with it", guarded=True)
    tls_key: Path | None = option(None, "PEM private key of that certificate", guarded=True)
    # Empty: pages of this machine only, because any open page can send requests through the browser.
    origins: tuple[str, ...] = option((), "web origins whose pages may use the server", guarded=True)
    # Long enough to continue a conversation, short enough not to be an archive.
    retention_days: int = option(
        30, "responses older than this are deleted; 0 stores none", least=0, guarded=True
    )
    # None: a SQLite file under paths.state, which needs no set-up.
    database: str | None = option(None, "SQLAlchemy URL of the store", guarded=True)
    # Empty: any folder on a loopback address, whose users can change the files anyway; none elsewhere.
    workspaces: tuple[str, ...] = option(
        (),
        "folders in which tasks may work and whose files may be read for editors",
        guarded=True,
    )
    # Off: response times would reveal to one key what another has sent.
    share_prefixes: bool = option(False, "share the prefix cache between keys", guarded=True)
    # Enough for a running answer to end.
    drain_s: float = option(
        10.0, "time given to running answers at shutdown", least=0, most=3600, guarded=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistSettings:
    # Balanced: shown at medium confidence or when typing pauses; users dislike too many suggestions.
    eagerness: str = option(
        "balanced", "how readily suggestions are shown", choices=("calm", "balanced", "eager")
    )
    completion: bool = option(True, "ghost text while typing")
    # A larger model that is loaded anyway improves ghost text at the cost of a pause.
    second_opinion: bool = option(True, "a larger model that is loaded confirms or replaces ghost text")
    # A small model does not know the project's names; the project's text does.
    project_text: bool = option(True, "ghost text uses the text of the file and of the project's other files")
    next_edit: bool = option(True, "suggest the next edit")
    audit: bool = option(True, "security findings while typing")
    # More context gives better suggestions; a second of prompt processing is acceptable on opening a file.
    context_tokens: int = option(
        0,
        "tokens of context for ghost text; 0: as many as this machine reads in a second",
        least=0,
        most=1 << 15,
    )
    # Auto: models under 4 billion parameters cope badly with long declarations and get one sentence each.
    tool_declarations: str = option(
        "auto",
        "tools shown to models: full, short (few, a sentence each), auto (short to small models)",
        choices=("auto", "full", "short"),
    )
    # Suggestions in generated and minified files are slow and useless.
    max_file_kb: int = option(1024, "larger files get no suggestions", least=1, most=1 << 20)
    # Files that hold secrets never enter a prompt. Guarded: a project must not shorten the list.
    exclude: tuple[str, ...] = option(
        (".env", ".env.*", "*.pem", "*.key", "id_rsa*", "id_ed25519*", ".netrc", "*.p12", "*.pfx"),
        "file name patterns that never enter a prompt",
        guarded=True,
    )
    # None: only the built-in tools. Guarded: MCP servers run outside the sandbox.
    mcp_servers: Path | None = option(
        None,
        "file of MCP servers (the common mcpServers format) that tasks may use",
        guarded=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnSettings:
    # Off: outcomes of suggestions are personal data. All guarded: a project must not decide about them.
    enabled: bool = option(
        False,
        "record outcomes of suggestions on this machine, and tune how readily they are shown",
        guarded=True,
    )
    # Hashed: a list of projects is personal data.
    projects: str = option(
        "hashed", "how projects are named in the records", choices=("hashed", "named"), guarded=True
    )
    # On: without the code there is nothing to export.
    text: bool = option(
        True, "record the code around suggestions too, for `keystroke learn export`", guarded=True
    )
    # About ten thousand suggestions with their code.
    max_mb: int = option(
        32, "disk space for the records, in MB; the oldest are deleted", least=1, most=4096, guarded=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """One `[models.NAME]` table. Limits of one model never count against another's."""

    engine: str = option("auto", "which engine runs it", choices=ENGINES, guarded=True)
    path: Path | None = option(None, "model folder or GGUF file", guarded=True)
    base_url: str | None = option(None, "server of a remote model", guarded=True)
    model: str | None = option(None, "its name at the server or in the library", guarded=True)
    api_key_env: str | None = option(None, "environment variable that holds the server's key", guarded=True)
    # 0: unknown. A remote server refuses what is too long for it.
    context: int = option(
        0, "context of a remote model: longer conversations are compacted", least=0, guarded=True
    )
    role: str = option(
        "fast",
        "fast: while typing; deep: hard tasks; chat: conversation",
        choices=("fast", "deep", "chat"),
        guarded=True,
    )
    precision: str = option("auto", "weights are converted to this", choices=PRECISIONS, guarded=True)
    adapter: Path | None = option(None, "adapter file to run it with", guarded=True)
    # No limits by default: on a personal machine the queue suffices.
    requests_per_minute: int = option(0, "per key; 0 means no limit", least=0, guarded=True)
    tokens_per_minute: int = option(0, "per key; 0 means no limit", least=0, guarded=True)
    concurrent: int = option(0, "answers at a time; 0 means what the engine batches", least=0, guarded=True)
    concurrent_per_key: int = option(
        0, "answers of one key at a time; 0 means no limit", least=0, guarded=True
    )
    # 0: as [scale] says for every model.
    replicas: int = option(0, "engine replicas under `keystroke scale`", least=0, most=100_000, guarded=True)
    # 0: always so many as `replicas`.
    max_replicas: int = option(
        0, "replicas at most, added under load; 0: no more than replicas", least=0, most=100_000, guarded=True
    )
    # 0: only requests count. Set it to what the KV cache of one replica holds where prompts are long.
    tokens_per_replica: int = option(
        0, "tokens in flight for which one replica more is added; 0: by requests only", least=0, guarded=True
    )
    gpus: float = option(0.0, "GPUs that one replica takes", least=0.0, most=64.0, guarded=True)
    cpus: float = option(1.0, "CPU cores that one replica takes", least=0.0, most=4096.0, guarded=True)
    cost_per_million_input: float = option(0.0, "price of a million prompt tokens", least=0.0, guarded=True)
    cost_per_million_cached: float = option(
        0.0, "price of a million reused prompt tokens", least=0.0, guarded=True
    )
    cost_per_million_output: float = option(0.0, "price of a million answer tokens", least=0.0, guarded=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSettings:
    # None: a Ray of its own on this machine, which listens on loopback only.
    address: str | None = option(None, "Ray cluster to run on; none starts one here", guarded=True)
    # Two: one can be replaced while the other serves.
    gateways: int = option(2, "gateway replicas", least=1, most=10_000, guarded=True)
    # One: more replicas need more hardware.
    replicas: int = option(1, "engine replicas of each model", least=1, most=100_000, guarded=True)
    # None: any node may run a gateway. On Kubernetes each gateway pod provides one.
    gateway_resource: str | None = option(
        None, "Ray resource that a node must have to run a gateway", guarded=True
    )
    # Prefix reuse is worth a quarter more load than the average; beyond that waiting costs more.
    load_factor: float = option(
        1.25,
        "load of a replica relative to the average above which work goes to another one",
        least=1.0,
        most=100.0,
    )
    # Long enough for Ray to notice a loss and start another replica with a small model.
    patience_s: float = option(
        120.0, "how long a turn waits for another replica after its own is lost", least=1.0, most=3600
    )
    # None: no traces. Guarded: they contain who used which model when.
    traces: str | None = option(
        None, "where OpenTelemetry spans go: a folder, or the URL of a collector (OTLP)", guarded=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingSettings:
    # On: commands and editors share loaded models. Guarded: it decides what runs on this machine.
    enabled: bool = option(True, "commands share one gateway in the background", guarded=True)
    # Long enough for the next command, short enough to free the memory.
    idle_s: float = option(
        900.0,
        "idle time after which the gateway and models loaded on demand are stopped",
        least=0.0,
        most=604_800,
        guarded=True,
    )
