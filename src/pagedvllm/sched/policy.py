"""Who is next, and who has to give way: first come first served, or by priority.

vLLM: v1/core/sched/request_queue.py, FCFSRequestQueue and PriorityRequestQueue.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Protocol

from pagedvllm.request import Request


class RequestQueue(Protocol):
    """The waiting requests, in the order in which they will be served."""

    def add(self, request: Request) -> None:
        """A request that has just arrived."""
        ...

    def put_back(self, request: Request) -> None:
        """A request that was taken out before and comes back: preempted, or passed over."""
        ...

    def peek(self) -> Request: ...

    def pop(self) -> Request: ...

    def remove(self, request: Request) -> None: ...

    def victim(self, running: Sequence[Request]) -> int:
        """The index of the running request (there is one) that gives its memory away."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue:
    """In order of arrival. Who comes back goes to the front; the victim is the newest."""

    def __init__(self) -> None:
        # Constant time at both ends, and in the middle.
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def victim(self, running: Sequence[Request]) -> int:
        return len(running) - 1

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


def rank(request: Request) -> tuple[int, float, str]:
    """Smaller goes first."""
    return request.priority, request.arrival_time, request.request_id


class PriorityQueue:
    """Smallest priority number first, then earliest arrival. The victim is the last.

    No two requests should have both in common: they could preempt each other for ever.
    """

    def __init__(self) -> None:
        # Of (rank, serial, request); one whose request is not in _requests was removed.
        # No two serials are equal, so requests themselves are never compared.
        self._heap: list[tuple[tuple[int, float, str], int, Request]] = []
        self._requests: dict[str, Request] = {}
        self._serial = count()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, (rank(request), next(self._serial), request))

    put_back = add

    def peek(self) -> Request:
        while not self._is_here(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._requests[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        if len(self._heap) > 2 * len(self._requests):  # rare: a removal is cheap on average
            self._heap = [entry for entry in self._heap if self._is_here(entry[2])]
            heapq.heapify(self._heap)

    def _is_here(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def victim(self, running: Sequence[Request]) -> int:
        order = [(request.priority, request.arrival_time) for request in running]
        return order.index(max(order))

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=rank))


QUEUES: dict[str, type[FCFSQueue | PriorityQueue]] = {
    "fcfs": FCFSQueue,
    "priority": PriorityQueue,
}
