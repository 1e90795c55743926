"""Stop strings: looked for in the text, because no list of tokens could stand for one.

A string may begin in one token and end in another, and the same text has many tokenisations.
vLLM: v1/engine/detokenizer.py, BaseIncrementalDetokenizer and check_stop_strings.
"""

from __future__ import annotations

from pagedvllm.sampling_params import SamplingParams


class StopStrings:
    """The text of one sequence, and the stop string that has ended it, if one has."""

    def __init__(self, params: SamplingParams) -> None:
        stop = params.stop or []
        self.stop = [stop] if isinstance(stop, str) else stop
        self.include = params.include_stop_str_in_output
        self.text = ""
        self.met: str | None = None
        # The end of the text may be the beginning of a stop string: it is not shown yet.
        longest = max(map(len, self.stop), default=1)
        self.held_back = 0 if self.include else longest - 1

    def add(self, delta: str, search: bool = True) -> bool:
        """Take in the next piece of text. True: it completes a stop string.

        search: False while min_tokens is not reached; what comes until then never stops.
        """
        seen = len(self.text) if search else len(self.text) + len(delta)
        self.text += delta
        ends = [
            (found + len(stop), place, stop)
            for place, stop in enumerate(self.stop)
            if (found := self.text.find(stop, max(seen + 1 - len(stop), 0))) >= 0
            and found + len(stop) > seen
        ]
        if not ends:
            return False
        end, _, self.met = min(ends)  # complete first; of equals the first listed
        self.text = self.text[: end if self.include else end - len(self.met)]
        return True

    def shown(self, finished: bool) -> str:
        """The text that is certain by now."""
        hide = 0 if finished else self.held_back
        return self.text[: max(len(self.text) - hide, 0)]
