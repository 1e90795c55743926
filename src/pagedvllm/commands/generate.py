"""`pagedvllm generate`: one prompt, the answer as it comes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from typing import Any

from pagedvllm.config import DTYPES, ENGINES, LOAD_FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="embedded name, directory or hub name (default: the embedded model)"
    )
    parser.add_argument(
        "--prompt", required=True, help="the text; '-' reads it from standard input"
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="continue the text as it is, without the chat template",
    )
    parser.add_argument("--system", help="a system message for the chat template")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="0 (the default): always the likeliest token",
    )
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--stop",
        action="append",
        help="text that ends the answer; may be given several times",
    )
    parser.add_argument("--min-tokens", type=int, default=0)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument(
        "--engine", default="default", help=f"{', '.join(ENGINES)} or module:Class"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--load-format", default="auto", choices=LOAD_FORMATS)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the whole output as one JSON object at the end",
    )


def run(args: argparse.Namespace) -> int:
    from pagedvllm import (  # after the arguments are known to be good: torch takes seconds
        LLM,
        SamplingParams,
    )

    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
        min_p=args.min_p, seed=args.seed, stop=args.stop, min_tokens=args.min_tokens,
        ignore_eos=args.ignore_eos,
    )  # fmt: skip
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not text:
        raise ValueError("--prompt is empty")
    if args.raw and args.system:
        raise ValueError("--system needs the chat template: leave out --raw")
    settings = {
        name: getattr(args, name)
        for name in ("engine", "device", "dtype", "load_format", "max_model_len")
    }
    _progress("loading the model ...")
    llm = LLM(args.model, **settings)
    prompt: Any = text
    if not args.raw:
        system = [{"role": "system", "content": args.system}] if args.system else []
        prompt = llm.tokenizer.apply_chat_template(
            [*system, {"role": "user", "content": text}]
        )
    return _print_stream(llm, prompt, params, as_json=args.json)


def _print_stream(llm: Any, prompt: Any, params: Any, as_json: bool) -> int:
    start, printed, output = time.perf_counter(), 0, None
    for output in llm.stream(prompt, params):
        if not as_json:
            print(output.outputs[0].text[printed:], end="", flush=True)
            printed = len(output.outputs[0].text)
    assert output is not None
    if output.error:
        raise ValueError(output.error)
    print(json.dumps(asdict(output), ensure_ascii=False) if as_json else "")
    count, seconds = len(output.outputs[0].token_ids), time.perf_counter() - start
    rate = f"{count} generated in {seconds:.1f} s ({count / seconds:.1f} tokens/s)"
    _progress(f"{len(output.prompt_token_ids)} prompt tokens, {rate}")
    return 0


def _progress(line: str) -> None:
    """To a person at a terminal only, and never in the way of the text."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
