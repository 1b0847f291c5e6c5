"""How many tokens of a conversation with a hybrid model are read again, here and by llama.cpp's server.

Regime: 20 turns over HTTP (`/v1/chat/completions`), one client, a model of four layers in the shape of
Qwen3.5's mixtures with random weights and the vocabulary of a real file. A recurrent state cannot be cut, so
a server needs copies of it at the right places. Answers come back as they were written, or without their
first half, as reasoning is left out; in a third run a message in the middle is edited in each turn. The floor
is what no earlier prompt or answer had. Answers are one word, over and over (`logit_bias`), since random
text would not be cut into the same tokens again. llama.cpp's server comes with the package `xllamacpp`, of
which `--peer` names the unpacked folder.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.random_models import SHAPES, write_model
from bench.record import record
from keystroke.engine.tokenizer import load_tokenizer

TURNS, ANSWER = 20, 24
_PEER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path, settings.n_ctx, settings.n_parallel = sys.argv[2], 8192, 1
settings.cpuparams.n_threads = 1  # counts are compared, and its threads wait by spinning
server = xllamacpp.Server(settings)
print(server.listening_address, flush=True)
time.sleep(3600)
"""


@contextmanager
def serving(command: list[str]) -> Iterator[str]:
    """The address of a server that the command starts and names in its output."""
    with tempfile.NamedTemporaryFile("r") as said, open(said.name, "w") as output:
        # A file, since a pipe that nobody reads would stop the server.
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while (found := re.search(r"http://127\.0\.0\.1:\d+", said.read())) is None:
                if process.poll() is not None:
                    raise SystemExit(f"{command[0]} ended without serving")
                time.sleep(0.2)
                said.seek(0)
            yield found[0]
        finally:
            process.kill()
            process.wait()


def ask(address: str, messages: list[dict[str, str]], word: int) -> tuple[int, int, str]:
    """The tokens of the prompt, those that were not read again, and the answer."""
    body = {"model": "auto", "messages": messages, "max_tokens": ANSWER, "temperature": 0}
    body["logit_bias"] = {str(word): 100}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    for _ in range(120):
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                found = json.load(reply)
            break
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise SystemExit(error.read().decode()) from None
            time.sleep(0.5)  # still loading
    else:
        raise SystemExit(f"{address} does not answer")
    usage = found["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], cached, found["choices"][0]["message"]["content"]


def converse(address: str, kind: str, words: list[str], word: int) -> dict[str, int]:
    """The tokens that the prompts of all turns had, and those that were read."""
    dice = np.random.default_rng(7)

    def text(count: int) -> str:
        return " ".join(words[int(i)] for i in dice.integers(0, len(words), count))

    messages = [{"role": "system", "content": f"{kind}. {text(300)}"}]
    total = read = most = 0
    for _ in range(TURNS):
        messages.append({"role": "user", "content": text(int(dice.integers(20, 150)))})
        prompt, cached, answer = ask(address, messages, word)
        total, read, most = total + prompt, read + prompt - cached, max(most, prompt - cached)
        if kind == "shortened":
            answer = " " + " ".join(answer.split()[: ANSWER // 2])
        messages.append({"role": "assistant", "content": answer})
        if kind == "edited":
            messages[max(len(messages) // 4 * 2 - 1, 1)]["content"] += " again"
    return {"prompts": total, "read": read, "most_in_a_turn": most}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("vocabulary", type=Path, help="a GGUF file with Qwen's vocabulary and chat template")
    parser.add_argument("--peer", type=Path, help="the unpacked folder of the package xllamacpp")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "talk.gguf"
        sizes: dict[str, Any] = {
            "hidden": 256,
            "vocab": 151_936,
            "experts": 16,
            "top": 4,
            "width": 256,
            "shared": 256,
        }
        write_model(path, replace(SHAPES["qwen3.6-35b-a3b"], heads=4, **sizes), 4, options.vocabulary)
        (word,) = load_tokenizer(path).encode(" the")
        words = ["value", "list", "name", "file", "error", "index", "while", "number", "string", "parse"]
        commands = {"ours": [sys.executable, "-m", "keystroke", "serve", "--port", "0", "--model", str(path)]}
        if options.peer is not None:
            commands["llama.cpp"] = [sys.executable, "-c", _PEER, str(options.peer), str(path)]
        for peer, command in commands.items():
            with serving(command) as address:
                for kind in ("as written", "shortened", "edited"):
                    found = converse(address, kind, words, word)
                    figures |= {f"{peer} {kind} {key}": value for key, value in found.items()}
                    print(f"{peer:10} {kind:10} {found}")
    record("conversation", figures)


if __name__ == "__main__":
    main()
