"""The engine behind `LLM`: a front end with text around a core with ids.

vLLM: v1/engine/llm_engine.py, LLMEngine.
"""

from __future__ import annotations

from pagedvllm.config import EngineConfig
from pagedvllm.engine.core import EngineCore
from pagedvllm.engine.input_processor import InputProcessor
from pagedvllm.engine.messages import SchedulerStats
from pagedvllm.engine.output_processor import OutputProcessor
from pagedvllm.hub import resolve_model
from pagedvllm.outputs import RequestOutput
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.tokenizer import Tokenizer


class LLMEngine:
    """InputProcessor -> EngineCore -> OutputProcessor, all in one process."""

    def __init__(self, config: EngineConfig) -> None:
        dummy = config.model.load_format == "dummy"
        path = resolve_model(config.model.model, need_weights=not dummy)
        self.tokenizer = Tokenizer(path)
        self.core = EngineCore(config)
        eos = self.tokenizer.eos_token_ids
        self.input_processor = InputProcessor(eos, config.engine)
        self.output_processor = OutputProcessor(self.tokenizer)
        self.scheduler_stats: SchedulerStats = self.core.make_stats()

    @property
    def max_model_len(self) -> int:
        return self.core.max_model_len

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
    ) -> None:
        """Queue a request. Raises ValueError, by name, for what this engine cannot do."""
        samples = self.input_processor.process(request_id, prompt_token_ids, params)
        self.output_processor.add_request(request_id, prompt, samples)
        for sample in samples:
            self.core.add_request(sample)

    def abort_request(self, request_id: str) -> None:
        """Forget a request. An unknown id is fine: it may just have finished."""
        self.core.abort_requests(self.output_processor.abort_request(request_id))

    def has_unfinished_requests(self) -> bool:
        return bool(self.output_processor.requests)

    def step(self) -> list[RequestOutput]:
        """One step of the core; outputs of who got something from it."""
        step = self.core.step()
        self.scheduler_stats = step.scheduler_stats
        outputs, ended = self.output_processor.process_outputs(step.outputs)
        self.core.abort_requests(ended)
        return outputs
