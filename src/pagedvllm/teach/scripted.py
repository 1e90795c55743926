"""An executor without a model: it says what a script says. For labs and tests of everything above the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pagedvllm.sched.limits import Device
from pagedvllm.sched.output import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from pagedvllm.config import EngineConfig
    from pagedvllm.engine.worker_base import BatchLimits


class ScriptedExecutor:
    """`distributed_executor_backend="pagedvllm.teach.scripted:ScriptedExecutor"`.

    script: request id -> its output tokens; whoever is not in it, or has said all, says `filler`.
    """

    script: ClassVar[dict[str, list[int]]] = {}
    filler: ClassVar[int] = 7

    def __init__(self, config: EngineConfig) -> None:
        self.device, self.page_bytes = Device("cpu"), 1
        self.max_model_len = config.model.max_model_len or 1024
        self.said: dict[str, int] = {}  # output tokens of each request so far
        self.lengths: dict[str, int] = {}  # tokens of each request, prompt and output

    def determine_available_memory(self, limits: BatchLimits) -> int:
        return 2**20

    def initialize_cache(self, num_blocks: int, limits: BatchLimits) -> None:
        pass

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for new in output.scheduled_new_reqs:
            self.lengths[new.request_id] = len(new.token_ids)
            self.said[new.request_id] = len(new.token_ids) - new.num_prompt_tokens
        sampled = []
        for name, count in output.num_scheduled_tokens.items():
            whole = output.num_computed_tokens[name] + count == self.lengths[name]
            sampled.append([self._next(name)] if whole else [])
        return ModelRunnerOutput(list(output.num_scheduled_tokens), sampled)

    def _next(self, name: str) -> int:
        words, said = self.script.get(name, []), self.said[name]
        self.said[name] += 1
        self.lengths[name] += 1
        return words[said] if said < len(words) else self.filler
