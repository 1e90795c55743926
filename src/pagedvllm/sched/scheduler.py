"""The scheduler: in each step, who advances and by how many tokens.

There is no prefill phase and no decode phase. Every request has tokens, and computed ones,
and a step moves the second number towards the first, within one budget for all.
Papers: Yu et al., "Orca", OSDI 2022; Kwon et al., SOSP 2023; Agrawal et al.,
"Sarathi-Serve", OSDI 2024.
vLLM: v1/core/sched/scheduler.py, Scheduler; its synchronous case decides in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagedvllm.config import SchedulerConfig
from pagedvllm.kv.protocol import InvariantError, KVCache
from pagedvllm.outputs import FinishReason
from pagedvllm.request import Request, RequestStatus
from pagedvllm.sched.features import Admission, SchedulerFeature
from pagedvllm.sched.limits import check_limits
from pagedvllm.sched.output import (
    EngineCoreOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from pagedvllm.sched.policy import QUEUES, RequestQueue

FINISHED: dict[FinishReason, RequestStatus] = {
    "stop": RequestStatus.FINISHED_STOPPED,
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
    "error": RequestStatus.FINISHED_ERROR,
}


class Scheduler:
    """Owns all unfinished requests.

    schedule() puts a step together; update() takes in what the model made of it.
    """

    # True: also where vLLM 0.30.0 lets a later request hit a block that was never filled.
    like_vllm = False

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCache,
        max_model_len: int,
        features: Sequence[SchedulerFeature] = (),
    ) -> None:
        self.max_num_seqs, self.max_num_batched_tokens = check_limits(config, max_model_len)
        self.config, self.kv, self.features = config, kv, features
        self.max_model_len = max_model_len
        self.threshold = config.long_prefill_token_threshold or max_model_len
        self.watermark_blocks = int(config.watermark * kv.num_blocks)
        # The most tokens that one request can hold, alone; and the most that are ever
        # computed: the last one is only sampled.
        self.capacity = (kv.num_blocks - 1) * kv.block_size
        self.longest = min(max_model_len - 1, self.capacity)
        self.requests: dict[str, Request] = {}  # all unfinished ones, in order of arrival
        self.waiting: RequestQueue = QUEUES[config.policy]()
        self.running: list[Request] = []  # in order of admission
        self.kept: dict[str, Request] = {}  # finished, but a feature needs their blocks
        self.step = 0  # the newest one put together
        self.done_step = 0  # the newest one taken in
        self._finished_req_ids: list[str] = []  # not yet announced to the workers
        self._retracted_req_ids: list[str] = []  # the same, of a step that failed
        self._refused: list[EngineCoreOutput] = []  # not yet reported

    # -------------------------------------------------------------- requests come and go

    def add_request(self, request: Request) -> None:
        """Queue a request. One that can never be served ends here, alone, with an error."""
        if request.request_id in self.requests or request.request_id in self.kept:
            raise ValueError(f"request_id {request.request_id!r} is in use")
        self.requests[request.request_id] = request
        count, limit = request.num_tokens, self.max_model_len
        if count >= limit:
            fit = f"with max_model_len {limit} at most {limit - 1} fit"
        elif count > self.capacity:
            fit = f"the whole KV cache holds {self.capacity}"
        else:
            self.waiting.add(request)
            return
        request.error = f"the prompt has {count} tokens; {fit}"
        self._finish(request, RequestStatus.FINISHED_ERROR)
        self._refused.append(
            EngineCoreOutput(request.request_id, [], "error", None, request.error)
        )

    def finish_requests(
        self,
        request_ids: Iterable[str],
        status: RequestStatus = RequestStatus.FINISHED_ABORTED,
    ) -> list[Request]:
        """End requests from outside, wherever they stand. An unknown id is fine."""
        if not status.finished:
            raise ValueError(f"status must be a finished one, got {status.name}")
        ended = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        for request in ended:
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
            self._finish(request, status)
        return ended

    def has_requests(self) -> bool:
        """Whether a step is needed: also to tell the workers who has finished."""
        return bool(self.requests or self._finished_req_ids)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Out of the books, its memory given back. The caller took it out of its queue."""
        request.status = status
        del self.requests[request.request_id]
        self._finished_req_ids.append(request.request_id)
        keep = [
            feature.finished(request) for feature in self.features
        ]  # all must hear of it
        if any(keep):
            self.kept[request.request_id] = request
        else:
            self.release(request)

    def release(self, request: Request) -> None:
        """Give back the blocks of a finished request, once no batch in flight uses them."""
        self.kept.pop(request.request_id, None)
        self.kv.free(request, request.last_step if self.in_flight(request) else 0)

    # -------------------------------------------------------------- one step

    def schedule(self) -> SchedulerOutput:
        """Running requests first, then waiting ones, until the token budget is spent.

        Nobody is admitted in a step that had to preempt: there is no memory to admit into.
        """
        self.step += 1
        output = SchedulerOutput(self.step)
        budget = self._schedule_running(output, self.max_num_batched_tokens)
        if not output.preempted_req_ids:
            self._schedule_waiting(output, budget)
        self._announce(output)
        for request_id, num_new in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens += num_new
            request.last_step = self.step
            for feature in self.features:
                feature.scheduled(request, num_new)
        return output

    def _announce(self, output: SchedulerOutput) -> None:
        """Whom the workers must forget: the finished, and those of a step that failed."""
        output.finished_req_ids, self._finished_req_ids = self._finished_req_ids, []
        output.preempted_req_ids += self._retracted_req_ids
        self._retracted_req_ids = []

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        """Advance the running requests in order. Where memory is short, preempt.

        Returns what is left of the budget.
        """
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_computed, goal = request.num_computed_tokens, request.num_tokens
            for feature in self.features:
                goal += feature.extra_tokens(request)
            num_new = min(goal, self.longest) - num_computed  # no guess runs over the end
            num_new = min(num_new, self.threshold, budget)
            if num_new <= 0:  # all its tokens are in flight
                index += 1
                continue
            while (block_ids := self.kv.allocate(request, num_new)) is None:
                victim_index = self.waiting.victim(self.running)
                victim = self.running[victim_index]
                if self.in_flight(victim):  # its blocks would come too late
                    return budget
                budget += self._take_back(victim, output)
                self._preempt(victim, victim_index, output)
                index -= victim_index < index
                if victim is request:
                    return budget
            output.add(request.request_id, num_computed, num_new, block_ids)
            budget -= num_new
            index += 1
        return budget

    def _take_back(self, victim: Request, output: SchedulerOutput) -> int:
        """Unschedule a victim. The tokens that it gives back: 0 before its turn."""
        if not self.like_vllm:  # this step will not fill the blocks that it announced
            self.kv.forget(victim, victim.num_computed_tokens)
        return output.take_back(victim.request_id)

    def _preempt(self, victim: Request, index: int, output: SchedulerOutput) -> None:
        """Take all its blocks and let it wait. It will compute all its tokens again."""
        del self.running[index]
        self.kv.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.waiting.put_back(victim)
        output.preempted_req_ids.append(victim.request_id)

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        """Admit from the head of the queue, as long as the head fits.

        One that does not fit is never skipped: it would starve.
        """
        skipped: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting.peek()
            answer = self._may_start(request)
            if answer is Admission.SKIP:
                skipped.append(self.waiting.pop())
                continue
            if answer is Admission.STOP:
                break
            num_computed = request.num_computed_tokens or self.kv.lookup(request)
            num_new = min(request.num_tokens - num_computed, self.threshold)
            if num_new > budget and not self.config.enable_chunked_prefill:
                break
            num_new = min(num_new, budget)
            whole = request.num_tokens if self.config.scheduler_reserve_full_isl else 0
            spare = self.watermark_blocks if self.running else 0
            block_ids = self.kv.allocate(request, num_new, whole=whole, spare=spare)
            if block_ids is None:
                break
            self._admit(self.waiting.pop(), num_computed, output)
            output.add(request.request_id, num_computed, num_new, block_ids)
            budget -= num_new
        for request in reversed(skipped):
            self.waiting.put_back(request)

    def _may_start(self, request: Request) -> Admission:
        for feature in self.features:
            answer = feature.admit(request)
            if answer is not Admission.ADMIT:
                return answer
        return Admission.ADMIT

    def _admit(self, request: Request, num_computed: int, output: SchedulerOutput) -> None:
        """To the end of the running list. The workers are told all of it."""
        if request.status is RequestStatus.PREEMPTED:
            output.resumed_req_ids.append(request.request_id)
        else:
            request.num_cached_tokens = num_computed
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed
        self.running.append(request)
        output.scheduled_new_reqs.append(NewRequestData.of(request))

    def in_flight(self, request: Request) -> bool:
        """Whether a batch that has not come back computes some of its tokens."""
        return request.last_step > self.done_step

    # -------------------------------------------------------------- what came of it

    def update(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Append the sampled tokens and end the requests that are done.

        Steps come back in the order in which they were made.
        """
        self.done_step = output.step
        self.kv.step_done(output.step)
        changes, self._refused = self._refused, []
        any_finished = False
        for request_id, tokens in zip(result.req_ids, result.sampled, strict=True):
            request = self.requests.get(request_id)
            if request is None or request.last_step < output.step or not tokens:
                continue  # aborted in flight (the id may be in use again), or in its prompt
            change = self._append(request, tokens)
            changes.append(change)
            any_finished |= change.finish_reason is not None
        if any_finished:
            self.running = [request for request in self.running if not request.finished]
        return changes

    def _append(self, request: Request, tokens: list[int]) -> EngineCoreOutput:
        """Take in one request's tokens, up to the one that ends it."""
        reason: FinishReason | None = None
        for taken, token in enumerate(tokens, 1):
            reason = request.append(token, self.max_model_len)
            if reason is not None:
                tokens = tokens[:taken]
                break
        for feature in self.features:
            feature.received(request, tokens)
        count, most = request.num_tokens, self.capacity
        if reason is None and count > most:  # nobody's preemption could make room
            grown = f"the request has grown to {count} tokens"
            request.error, reason = f"{grown}; the KV cache holds {most}", "error"
        if reason is not None:
            self._finish(request, FINISHED[reason])
        name, stop_reason, error = request.request_id, request.stop_reason, request.error
        hits = request.num_cached_tokens
        return EngineCoreOutput(name, tokens, reason, stop_reason, error, hits)

    def retract(self, output: SchedulerOutput) -> None:
        """A step failed, and nothing that it should have computed is there.

        Its requests start again from the queue. A cached block may have been hit in the
        very step that was to compute it, so no request of the step is spared.
        """
        self.done_step = output.step
        self.kv.step_done(output.step, failed=True)
        # Perhaps nobody heard of those that had finished.
        self._finished_req_ids = output.finished_req_ids + self._finished_req_ids
        batch = [r for r in self.running if r.request_id in output.num_scheduled_tokens]
        for request in batch:
            self.kv.forget(request, output.num_computed_tokens[request.request_id])
        for request in reversed(batch):  # so that the first one ends up at the front
            self._preempt(request, self.running.index(request), output)
        self._retracted_req_ids += output.preempted_req_ids

    def check_invariants(self) -> None:
        """Raise InvariantError, with what is wrong, unless queues and memory agree."""
        running, waiting = set(self.running), set(self.waiting)
        unfinished, twice = set(self.requests.values()), len(running) != len(self.running)
        if twice or running & waiting or running | waiting != unfinished:
            raise InvariantError("every unfinished request must run or wait, and only once")
        for request in self.requests.values():
            name, status = request.request_id, request.status
            if (request in running) != (status is RequestStatus.RUNNING):
                raise InvariantError(f"{name!r} is {status.name} in the wrong queue")
            computed, total = request.num_computed_tokens, request.num_tokens
            if not 0 <= computed <= total:
                raise InvariantError(f"{name!r} has computed {computed} of {total} tokens")
        if len(self.running) > self.max_num_seqs:
            run, limit = len(self.running), self.max_num_seqs
            raise InvariantError(f"{run} requests run, max_num_seqs is {limit}")
        self.kv.check_invariants(self.requests | self.kept)
