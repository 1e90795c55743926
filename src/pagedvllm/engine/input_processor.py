"""From what a caller asks for to what the core can queue.

vLLM: v1/engine/input_processor.py, InputProcessor; v1/engine/parallel_sampling.py for n.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from pagedvllm.engine.messages import EngineCoreRequest
from pagedvllm.sampling_params import BASIC_FIELDS, SamplingParams

ENGINE_FIELDS = BASIC_FIELDS | {"min_tokens", "stop", "include_stop_str_in_output", "n"}


class InputProcessor:
    """Checks parameters, and makes one core request for each of the n samples."""

    def __init__(self, eos_token_ids: tuple[int, ...], engine: str = "default") -> None:
        self.eos_token_ids, self.engine = eos_token_ids, engine
        self._arrivals = count()

    def process(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> list[EngineCoreRequest]:
        """The n sequences of a request: ids "0_name", "1_name", ...; just "name" for one.

        Raises:
            ValueError: a field asks for what this engine cannot do; the message names it.
        """
        params.refuse_unsupported(ENGINE_FIELDS, self.engine)
        if params.stop and not params.detokenize:
            raise ValueError("stop needs text to search: leave detokenize at True")
        arrival, eos = float(next(self._arrivals)), self.eos_token_ids
        requests = []
        for index in range(params.n):
            name = request_id if params.n == 1 else f"{index}_{request_id}"
            each = _sample(params, index)
            requests.append(EngineCoreRequest(name, prompt_token_ids, each, eos, arrival))
        return requests


def _sample(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of sample `index` of n. With a seed, each has its own: seed + index."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + index) % 2**63
    return replace(params, n=1, seed=seed)
