"""How long are real answers? Writes src/pagedvllm/teach/answer_lengths.json, which chapter 2 and its lab use.

Each question goes through the chat template of the embedded model, which answers greedily in fp32, to its own end or to
MAX_TOKENS. Takes minutes on a CPU. Run from the repository root: python benchmarks/answer_lengths.py
"""

from __future__ import annotations

import json
from pathlib import Path

from pagedvllm import LLM, SamplingParams
from pagedvllm.batch_runner import BatchRunner
from pagedvllm.batching import admit_continuous, serve
from pagedvllm.request import Request

MAX_TOKENS = 256
TARGET = Path(__file__).resolve().parents[1] / "src/pagedvllm/teach/answer_lengths.json"

QUESTIONS = """
What is the capital of France?
Write a haiku about rain.
Explain photosynthesis to a child.
Translate "good morning" into Spanish.
What is 7 times 8?
List three uses of baking soda.
Who wrote Pride and Prejudice?
How do I boil an egg?
Is a tomato a fruit or a vegetable?
Write a short story about a lighthouse keeper.
What does HTTP stand for?
Give me a recipe for pancakes.
Name the planets of the solar system.
Why is the sky blue?
Summarise the plot of Romeo and Juliet in two sentences.
What is the boiling point of water?
Write an email asking for a day off.
How many continents are there?
What is the difference between a list and a tuple in Python?
Suggest a name for a grey cat.
Describe the water cycle.
Is 91 a prime number?
Write a product description for a wooden desk.
What year did the first people land on the Moon?
How can I sleep better?
Say hello in five languages.
What is the largest ocean?
Write a limerick about a programmer.
Explain what an operating system does.
Do cats see in colour?
Plan a weekend in Rome.
What is the chemical symbol of gold?
""".strip().splitlines()


def main() -> None:
    llm = LLM(engine="reference", dtype="float32", device="cpu")
    tokenizer = llm.tokenizer
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    requests = []
    for i, question in enumerate(QUESTIONS):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}])
        requests.append(Request(str(i), prompt, params, eos_token_ids=tokenizer.eos_token_ids))
    runner = BatchRunner(llm.engine.model, num_seats=16, capacity=384)  # type: ignore[attr-defined]
    for _ in serve(requests, 16, admit_continuous, runner.step):
        pass
    rows = [
        {"question": q, "prompt_tokens": r.num_prompt_tokens, "output_tokens": r.num_output_tokens}
        for q, r in zip(QUESTIONS, requests, strict=True)
    ]
    lines = ",\n    ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    made_by = "SmolLM2-135M-Instruct, greedy, fp32: benchmarks/answer_lengths.py"
    TARGET.write_text(f'{{"made_by": "{made_by}", "max_tokens": {MAX_TOKENS}, "answers": [\n    {lines}\n]}}\n')


if __name__ == "__main__":
    main()
