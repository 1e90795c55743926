"""A scheduler that writes down every step, in the format of replay and the trace player."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pagedvllm.config import SchedulerConfig
from pagedvllm.kv.protocol import KVCache
from pagedvllm.request import Request, RequestStatus
from pagedvllm.sched.features import SchedulerFeature
from pagedvllm.sched.output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from pagedvllm.sched.scheduler import Scheduler

Line = dict[str, Any]


class RecordingScheduler(Scheduler):
    """Decides nothing of its own. `trace` grows by one line for each step; `end()` sums up."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCache,
        max_model_len: int,
        features: Sequence[SchedulerFeature] = (),
    ) -> None:
        super().__init__(config, kv, max_model_len, features)
        self.trace: list[Line] = []
        self.recorded = 0  # lines so far, also those that somebody took out of `trace`
        self._open: dict[int, Line] = {}  # of steps that are in flight
        self.seen: dict[str, Request] = {}  # every request ever, in order of arrival
        self._arrived: list[str] = []
        self._aborted: list[str] = []

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.seen[request.request_id] = request
        self._arrived.append(request.request_id)

    def finish_requests(
        self,
        request_ids: Iterable[str],
        status: RequestStatus = RequestStatus.FINISHED_ABORTED,
    ) -> list[Request]:
        ended = super().finish_requests(request_ids, status)
        self._aborted += [request.request_id for request in ended]
        return ended

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        arrived, self._arrived = self._arrived, []
        aborted, self._aborted = self._aborted, []
        line = {"arrived": arrived, "aborted": aborted, **self._decisions(output)}
        self._open[output.step] = self._record(line)
        return output

    def update(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        changes = super().update(output, result)
        pairs = zip(result.req_ids, result.sampled, strict=True)
        line = self._open.pop(output.step)
        line |= {
            "sampled": {
                name: tokens[0] if len(tokens) == 1 else tokens
                for name, tokens in pairs
                if tokens
            },
            "finished": {
                c.request_id: self.seen[c.request_id].status.name
                for c in changes
                if c.finish_reason
            },
            "free_after_update": self.kv.num_free_blocks,
            **self.kv.snapshot(),
        }
        return changes

    def _decisions(self, output: SchedulerOutput) -> Line:
        """What schedule() decided, and how queues and tables stand after it."""
        admitted = [new.request_id for new in output.scheduled_new_reqs]
        resumed, preempted = set(output.resumed_req_ids), set(output.preempted_req_ids)
        tables = ((name, self.kv.block_ids(name)) for name in self.requests)
        return {
            "scheduled": dict(output.num_scheduled_tokens),
            "total": output.total_num_scheduled_tokens,
            "new": [name for name in admitted if name not in resumed],
            "running": [
                name for name in output.num_scheduled_tokens if name not in admitted
            ],
            "resumed": list(output.resumed_req_ids),
            "admitted_computed": {
                name: output.num_computed_tokens[name] for name in admitted
            },
            "preempted": [name for name in self.requests if name in preempted]
            if preempted
            else [],
            "preempted_output": sorted(preempted),
            "finished_notified": sorted(output.finished_req_ids),
            "new_block_ids": dict(output.new_block_ids),
            "running_queue": [request.request_id for request in self.running],
            "waiting_queue": [request.request_id for request in self.waiting],
            "free_after_schedule": self.kv.num_free_blocks,
            "blocks": {name: table for name, table in tables if table},
        }

    def retract(self, output: SchedulerOutput) -> None:
        super().retract(output)
        free = self.kv.num_free_blocks
        nothing = {"failed": True, "sampled": {}, "finished": {}, "free_after_update": free}
        self._open.pop(output.step).update(nothing, **self.kv.snapshot())

    def idle(self) -> None:
        """A step in which there was nothing to do."""
        self._record({"idle": True})

    def _record(self, line: Line) -> Line:
        self.trace.append({"step": self.recorded, **line})
        self.recorded += 1
        return self.trace[-1]

    def end(self) -> Line:
        """The last line of a trace: what became of every request; is any block missing?"""
        requests = {
            name: {
                "status": request.status.name,
                "prompt_len": request.num_prompt_tokens,
                "output": request.output_token_ids,
                "num_preemptions": request.num_preemptions,
                "num_computed_tokens": request.num_computed_tokens,
            }
            for name, request in self.seen.items()
        }
        leaked = self.kv.num_blocks - 1 - self.kv.num_free_blocks
        return {
            "end": True,
            "steps": self.recorded,
            "requests": requests,
            "leaked_blocks": leaked,
        }
