"""min_tokens: until a request has that many, nothing that would end it can be chosen.

vLLM: v1/sample/logits_processor/builtin.py, MinTokensLogitsProcessor.
"""

from __future__ import annotations

from torch import Tensor

from pagedvllm.sample.sampler import SamplingBatch


class MinTokens:
    """A logits processor. Stop strings are looked for where text is made, later."""

    def apply(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """[R, vocab] -> [R, vocab]: minus infinity where a row must not end yet."""
        rows: list[int] = []
        tokens: list[int] = []
        for row, params in enumerate(batch.params):
            if not params.min_tokens:
                continue
            num_output = len(batch.histories[row]) - batch.num_prompt_tokens[row]
            if num_output < params.min_tokens:
                ends = {*batch.eos_token_ids[row], *(params.stop_token_ids or ())}
                known = [token for token in ends if token < logits.shape[1]]
                rows += [row] * len(known)
                tokens += known
        if rows:
            logits[rows, tokens] = float("-inf")
        return logits
