"""`POST /infill`, the API that llama.vim and llama.vscode use.

Translates it to a completion with a suffix. `prompt` is the cursor's line up to the cursor; `input_extra` are
other files, put before the prefix.
"""

from __future__ import annotations

from keystroke.gateway.api.completions import TextRun
from keystroke.protocol.chat import Infill, Timings
from keystroke.protocol.requests import CompletionRequest, InfillRequest, stop_strings

_MAX_TOKENS = 128  # the default of the plugins


def infill_request(request: InfillRequest) -> tuple[CompletionRequest, str]:
    """The equivalent completion request, and the text of the other files."""
    max_tokens = request.n_predict if request.n_predict is not None and request.n_predict > 0 else _MAX_TOKENS
    stop = list(stop_strings(request.stop))
    completion = CompletionRequest(
        prompt=request.input_prefix + request.prompt,
        suffix=request.input_suffix,
        model=request.model or "fast",
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop=stop or None,
        max_tokens=max_tokens,
        grammar=request.grammar,
        json_schema=request.json_schema,
        priority="ghost",
        buffer=request.buffer,
    )
    extra = "".join(
        f"# {e.filename}\n{e.text}\n" if e.filename else f"{e.text}\n" for e in request.input_extra or ()
    )
    return completion, extra


def infill_body(run: TextRun) -> Infill:
    outcome = run.answer.outcome
    assert outcome is not None
    receipt = outcome.receipt
    stopped = {"stop": "eos", "length": "limit"}.get(outcome.finish, "none")
    return Infill(
        content=run.serializer.text,
        model=run.serializer.model,
        stop=True,
        tokens_predicted=receipt.output_tokens,
        tokens_evaluated=receipt.computed_tokens,
        tokens_cached=receipt.reused_tokens,
        truncated=False,
        timings=Timings(
            prompt_n=receipt.computed_tokens,
            prompt_ms=receipt.prompt_ms,
            prompt_per_second=_rate(receipt.computed_tokens, receipt.prompt_ms),
            predicted_n=receipt.output_tokens,
            predicted_ms=receipt.decode_ms,
            predicted_per_second=_rate(receipt.output_tokens, receipt.decode_ms),
        ),
        stop_type=stopped,
        generation_settings={"n_ctx": run.context_length},
    )


def _rate(count: int, milliseconds: float) -> float:
    return round(count / milliseconds * 1e3, 3) if milliseconds else 0.0
