"""A worker without a model: it knows only what SchedulerOutput says, and checks every row that attention would read.

Each cell of its cache holds the whole prefix that ends there, so a block that was reused too early, hit before it was
filled or put in the wrong place shows at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedvllm.sched.output import ModelRunnerOutput, SchedulerOutput

GARBAGE = ("garbage",)


@dataclass
class FakeWorker:
    block_size: int
    vocab: int = 50
    salts: dict[str, object] = field(default_factory=dict)  # request id -> what else its keys and values depend on
    tokens: dict[str, list[int]] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    cells: dict[tuple[int, int], tuple[object, ...]] = field(default_factory=dict)

    def receive(self, output: SchedulerOutput) -> None:
        """Take in one step's news, as a worker process does."""
        for request_id in output.finished_req_ids:
            self.tokens.pop(request_id, None)
            self.tables.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self.tokens[new.request_id] = list(new.token_ids)
            self.tables[new.request_id] = []
        for request_id, block_ids in output.new_block_ids.items():
            self.tables[request_id] += block_ids

    def execute(self, output: SchedulerOutput, fail: bool = False) -> ModelRunnerOutput:
        """Write all rows, then read; a token where a request's last row was computed. A failure leaves garbage."""
        self.receive(output)
        spans = {i: (start, start + output.num_scheduled_tokens[i]) for i, start in output.num_computed_tokens.items()}
        for request_id, (start, end) in spans.items():
            for position in range(start, end):
                cell = self.cell(request_id, position)
                self.cells[cell] = GARBAGE if fail else self.prefix(request_id, position)
        if fail:
            raise RuntimeError("the device is gone")
        result = ModelRunnerOutput([], [])
        for request_id, (_, end) in spans.items():
            for position in range(end):
                found, right = self.cells.get(self.cell(request_id, position)), self.prefix(request_id, position)
                assert found == right, f"{request_id}[{position}] reads {found}, which is not {right}"
            tokens = self.tokens[request_id]
            sampled = [hash(tuple(tokens)) % self.vocab] if end == len(tokens) else []
            tokens += sampled
            result.req_ids.append(request_id)
            result.sampled.append(sampled)
        return result

    def cell(self, request_id: str, position: int) -> tuple[int, int]:
        block = self.tables[request_id][position // self.block_size]
        assert block > 0, f"{request_id} writes to block {block}"
        return block, position % self.block_size

    def prefix(self, request_id: str, position: int) -> tuple[object, ...]:
        return self.salts.get(request_id), *self.tokens[request_id][: position + 1]
