"""From the core's tokens back to what callers see: text, reasons, usage.

vLLM: v1/engine/output_processor.py, OutputProcessor and RequestState.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pagedvllm.detokenizer import IncrementalDetokenizer, text_tokens
from pagedvllm.engine.messages import EngineCoreRequest
from pagedvllm.engine.stop_strings import StopStrings
from pagedvllm.outputs import CompletionOutput, RequestOutput
from pagedvllm.sched.output import EngineCoreOutput
from pagedvllm.tokenizer import Tokenizer


class SequenceState:
    """One of a request's n sequences: its tokens and its text so far."""

    def __init__(
        self, tokenizer: Tokenizer, request: EngineCoreRequest, index: int
    ) -> None:
        self.request_id, self.params = request.request_id, request.params
        prompt = request.prompt_token_ids
        self.detokenizer = IncrementalDetokenizer.of(tokenizer, prompt, self.params)
        self.stop_strings = StopStrings(self.params)
        self.output = CompletionOutput(index, "", [])

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    def update(self, change: EngineCoreOutput) -> None:
        """Take in a step's tokens, up to the one whose text completes a stop string."""
        output, text, reason = self.output, self.stop_strings, change.finish_reason
        num_shown = len(text_tokens(change.new_token_ids, reason, self.params))
        for place, token in enumerate(change.new_token_ids):
            output.token_ids.append(token)
            if place < num_shown:
                may_stop = len(output.token_ids) > self.params.min_tokens
                if text.add(self.detokenizer.add([token]), may_stop):
                    output.finish_reason, output.stop_reason = "stop", text.met
                    break
        else:
            output.finish_reason, output.stop_reason = reason, change.stop_reason
            if reason is not None:
                text.add(self.detokenizer.finish(), search=False)
        output.text = text.shown(self.finished)

    def snapshot(self) -> CompletionOutput:
        """As it is now: what a caller holds does not change under it."""
        return replace(self.output, token_ids=list(self.output.token_ids))


class RequestState:
    """What the front end keeps of a request: the text it came with, and its sequences."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        sequences: list[SequenceState],
    ) -> None:
        self.request_id, self.prompt, self.sequences = request_id, prompt, sequences
        self.prompt_token_ids = prompt_token_ids
        self.num_cached_tokens, self.error = 0, None  # type: tuple[int, str | None]

    def make_output(self) -> RequestOutput:
        finished = all(sequence.finished for sequence in self.sequences)
        outputs = [sequence.snapshot() for sequence in self.sequences]
        ids, hits = self.prompt_token_ids, self.num_cached_tokens
        return RequestOutput(
            self.request_id, self.prompt, ids, outputs, finished, self.error, hits
        )


class OutputProcessor:
    """All unfinished requests, as their callers know them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.requests: dict[str, RequestState] = {}
        self.owners: dict[
            str, tuple[RequestState, SequenceState]
        ] = {}  # by core request id

    def add_request(
        self, request_id: str, prompt: str | None, samples: Sequence[EngineCoreRequest]
    ) -> None:
        """Expect output for these samples. Raises ValueError if a name is in use."""
        for name in (request_id, *(sample.request_id for sample in samples)):
            if name in self.requests or name in self.owners:
                raise ValueError(f"request_id {name!r} is used by an unfinished request")
        sequences = [SequenceState(self.tokenizer, s, i) for i, s in enumerate(samples)]
        state = RequestState(request_id, prompt, samples[0].prompt_token_ids, sequences)
        self.requests[request_id] = state
        self.owners |= {each.request_id: (state, each) for each in sequences}

    def abort_request(self, request_id: str) -> list[str]:
        """Forget a request. The core's names for what is left of it; [] if it is unknown."""
        state = self.requests.pop(request_id, None)
        names = [each.request_id for each in state.sequences] if state else []
        return [name for name in names if self.owners.pop(name, None)]

    def process_outputs(
        self, changes: Iterable[EngineCoreOutput]
    ) -> tuple[list[RequestOutput], list[str]]:
        """(an output for each request that has news, core requests that must be aborted).

        A stop string ends a sequence here, and the core would go on with it.
        """
        news: dict[str, RequestState] = {}
        to_abort: list[str] = []
        for change in changes:
            if change.request_id not in self.owners:
                continue  # aborted while the step was under way
            state, sequence = self.owners[change.request_id]
            sequence.update(change)
            state.num_cached_tokens = change.num_cached_tokens
            state.error = state.error or change.error
            news[state.request_id] = state
            if sequence.finished:
                del self.owners[change.request_id]
                if change.finish_reason is None:
                    to_abort.append(change.request_id)
        outputs = [state.make_output() for state in news.values()]
        for output in outputs:
            if output.finished:
                del self.requests[output.request_id]
        return outputs, to_abort
