"""`LLM`: text in, text out. The engine behind it is found by name.

vLLM: entrypoints/llm.py, LLM; v1/engine/llm_engine.py, LLMEngine (the `Engine` protocol here).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from threading import Lock
from typing import Any, Protocol, cast

from pagedvllm.config import ENGINES, EngineConfig
from pagedvllm.interrupts import interrupts_wait
from pagedvllm.outputs import CompletionOutput, RequestOutput
from pagedvllm.plugins import resolve_from
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.tokenizer import Tokenizer

# Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}.
Prompt = str | list[int] | dict[str, Any]
Messages = list[dict[str, str]]


class Engine(Protocol):
    """What `LLM` asks of an engine. One `step()` advances some or all unfinished requests."""

    tokenizer: Tokenizer
    max_model_len: int

    def __init__(self, config: EngineConfig) -> None: ...

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
    ) -> None: ...

    def abort_request(self, request_id: str) -> None: ...

    def has_unfinished_requests(self) -> bool: ...

    def step(self) -> list[RequestOutput]: ...


class LLM:
    """An engine for offline use: LLM(model, dtype="float32", ...), all settings of `config`.

    Raises:
        TypeError, ValueError: a setting is unknown or out of range; the message names it.
        ModelError: the model cannot be found or read.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.config = EngineConfig.create(model=model, **settings)
        engine = resolve_from(ENGINES, self.config.engine, Engine)  # type: ignore[type-abstract]
        self.engine = engine(self.config)
        self._ids = count()
        self._lock = Lock()
        self._left: deque[str] = deque()  # requests that nobody waits for any more
        self._outputs: dict[str, RequestOutput] = {}  # the newest one of each request
        self._finished: set[str] = set()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in the order of the prompts.

        sampling_params: one for all, or one for each.
        use_tqdm: a progress bar; None: only on a terminal.

        A request that can never fit is refused alone: its output has finish reason "error"
        and a message.
        """
        parsed = [self._parse(prompt, i) for i, prompt in enumerate(_as_list(prompts))]
        params = _params_for_each(sampling_params, len(parsed))
        order: list[str] = []
        try:
            for (text, ids), each in zip(parsed, params, strict=True):
                order.append(self._add(text, ids, each))
            self._run(order, use_tqdm)
            return [self._outputs[request_id] for request_id in order]
        finally:  # an error or Ctrl-C: nothing of this call stays behind
            for request_id in order:
                self._forget(request_id)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template."""
        if not isinstance(messages, (list, tuple)):
            kind = type(messages).__name__
            raise TypeError(f"messages must be a list of messages, got {kind}")
        several = bool(messages) and isinstance(messages[0], (list, tuple))
        conversations = cast("list[Messages]", messages if several else [messages])
        prompts = [self.tokenizer.apply_chat_template(list(c)) for c in conversations]
        return self.generate(
            cast("list[Prompt]", prompts), sampling_params, use_tqdm=use_tqdm
        )

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """The growing output of one prompt, step by step. Leaving the loop aborts it."""
        text, ids = self._parse(prompt, 0)
        request_id = self._add(text, ids, _params_for_each(sampling_params, 1)[0])
        seen: RequestOutput | None = None
        try:
            while seen is None or not seen.finished:
                newest = self._outputs.get(request_id)
                if newest is seen:
                    self._step()
                elif newest is not None:
                    seen = newest
                    yield newest
        finally:
            self._forget(request_id)

    def _run(self, order: list[str], use_tqdm: bool | None) -> None:
        from tqdm import tqdm

        # tqdm's own None means: off unless stderr is a terminal.
        disable = None if use_tqdm is None else not use_tqdm
        waiting = set(order)
        with tqdm(total=len(order), disable=disable, desc="prompts", unit="") as bar:
            while waiting:
                done = waiting & self._finished
                waiting -= done
                bar.update(len(done))
                if waiting:
                    self._step()

    def _step(self) -> None:
        """Advance the engine. Outputs wait in `_outputs` for whoever asked for them: a stream
        and a `generate`, or several threads, may share one engine.
        """
        with self._lock:
            self._drop_left()
            with interrupts_wait():
                for output in self.engine.step():
                    self._outputs[output.request_id] = output
                    if output.finished:
                        self._finished.add(output.request_id)
            self._drop_left()

    def _forget(self, request_id: str) -> None:
        """Nobody waits for it. Whoever holds the lock drops it: that may be this very thread,
        in whose step the garbage collector has just ended a stream.
        """
        self._left.append(request_id)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_left()
            finally:
                self._lock.release()

    def _drop_left(self) -> None:
        while self._left:
            request_id = self._left.popleft()
            if request_id not in self._finished:
                self.engine.abort_request(request_id)
            self._finished.discard(request_id)
            self._outputs.pop(request_id, None)

    def _add(self, text: str | None, ids: list[int], params: SamplingParams) -> str:
        """Queue a request, or finish it at once with an error if it can never fit."""
        request_id = str(next(self._ids))
        longest = self.engine.max_model_len
        if len(ids) < longest:
            with self._lock:
                self.engine.add_request(request_id, text, ids, params)
            return request_id
        limit = f"with max_model_len {longest} at most {longest - 1} can be continued"
        error = f"the prompt has {len(ids)} tokens: {limit}"
        refused = [CompletionOutput(0, "", [], "error")]
        self._outputs[request_id] = RequestOutput(
            request_id, text, ids, refused, True, error
        )
        self._finished.add(request_id)
        return request_id

    def _parse(self, prompt: Prompt, index: int) -> tuple[str | None, list[int]]:
        """(text, token ids) of one prompt."""
        where = f"prompts[{index}]"
        if isinstance(prompt, dict):
            known = [key for key in ("prompt", "prompt_token_ids") if key in prompt]
            if len(known) != 1 or len(prompt) != 1:
                raise ValueError(
                    f"{where} must hold exactly one of 'prompt' and 'prompt_token_ids', got {sorted(map(str, prompt))}"
                )
            prompt = cast("str | list[int]", prompt[known[0]])
        if not isinstance(prompt, (str, list)):
            raise TypeError(
                f"{where} must be text or a list of token ids, got {type(prompt).__name__}"
            )
        text, ids = (
            (prompt, self.tokenizer.encode(prompt))
            if isinstance(prompt, str)
            else (None, list(prompt))
        )
        if not ids:
            raise ValueError(f"{where} is empty: a prompt needs at least one token")
        size = self.tokenizer.vocab_size
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool):
                raise TypeError(f"{where} must hold token ids, got {token!r}")
            if not 0 <= token < size:
                raise ValueError(
                    f"{where} holds token id {token}; the vocabulary has {size}"
                )
        return text, ids


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list. A list of integers is one prompt of token ids."""
    if isinstance(prompts, (str, dict)) or (
        isinstance(prompts, list) and prompts and isinstance(prompts[0], int)
    ):
        return [cast("Prompt", prompts)]
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(
            f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}"
        )
    return list(prompts)


def _params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)) or not all(
        isinstance(p, SamplingParams) for p in params
    ):
        raise TypeError(
            f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}"
        )
    if len(params) != count:
        raise ValueError(f"sampling_params has {len(params)} entries for {count} prompts")
    return list(params)
