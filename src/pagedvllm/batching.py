"""Many requests, few seats: all in and out together, or in and out at every step.

The second is iteration-level scheduling: Yu et al., "Orca", OSDI 2022; in vLLM it is called
continuous batching. The loop knows no model: what brings the requests on is handed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from pagedvllm.outputs import FinishReason
from pagedvllm.request import Request, RequestStatus

Seats = list[Request | None]  # who sits where; None: a free seat
Admit = Callable[[Seats, deque[Request]], None]  # lets requests of the line take free seats
Step = Callable[[Seats], object]  # brings every seated request on by one token

FINISHED: dict[FinishReason | None, RequestStatus] = {
    "stop": RequestStatus.FINISHED_STOPPED,
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
}


def admit_continuous(seats: Seats, waiting: deque[Request]) -> None:
    """Whoever is next in line takes a free seat, before any step."""
    for i, seat in enumerate(seats):
        if seat is None and waiting:
            request = seats[i] = waiting.popleft()
            request.status = RequestStatus.RUNNING


def admit_static(seats: Seats, waiting: deque[Request]) -> None:
    """A new batch begins when everybody of the last one has finished."""
    if seats.count(None) == len(seats):
        admit_continuous(seats, waiting)


def serve(
    requests: Iterable[Request], num_seats: int, admit: Admit, step: Step
) -> Iterator[tuple[Request | None, ...]]:
    """Bring all requests to their end. Yields, after each step, who sat where in it.

    The clock counts steps: a request with arrival_time 3 is in line before the fourth step.
    """
    coming = deque(sorted(requests, key=lambda request: request.arrival_time))
    waiting: deque[Request] = deque()
    seats: Seats = [None] * num_seats
    clock = 0
    while coming or waiting or any(seats):
        while coming and coming[0].arrival_time <= clock:
            waiting.append(coming.popleft())
        admit(seats, waiting)
        if any(seats):
            step(seats)
        yield tuple(seats)
        for i, request in enumerate(seats):
            if request is not None and request.finished:
                seats[i] = None
        clock += 1


def append_token(request: Request, token: int, longest: int) -> None:
    """Append a new token, and end the request if it was the last.

    longest: the most tokens a sequence may have, prompt and output.
    """
    reason = request.append(token, longest)
    if reason is not None:
        request.status = FINISHED[reason]
