"""Tokens per second without HTTP: all prompts handed to `LLM.generate` at once.

    python bench/offline.py [FOLDER] [--requests 64] [--input-len 512] [--output-len 128] [--repeats 3]
    python bench/offline.py FOLDER --load-format dummy --max-num-seqs 32 --save bench/results/offline.json

Prompts are random token ids, different in every run; a run before the first warms up. Other options of
`surefoot serve` that bear on the engine are given as `--set name=value`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from surefoot import LLM, SamplingParams
from surefoot.api import benchmark
from surefoot.api.machine import describe_machine


def run(llm: LLM, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Seconds, and tokens per second out and in all."""
    draw = random.Random(seed)
    most = llm.tokenizer.token_count
    prompts = [[draw.randrange(most) for _ in range(options.input_len)] for _ in range(options.requests)]
    params = SamplingParams(max_tokens=options.output_len, ignore_eos=True, temperature=0.0)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_progress=False)
    seconds = time.perf_counter() - began
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        raise failed[0]
    out = options.requests * options.output_len
    return {
        "seconds": seconds,
        "output_tokens_per_second": out / seconds,
        "total_tokens_per_second": (out + options.requests * options.input_len) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--save", help="JSON file for the result")
    options = parser.parse_args()
    settings: dict[str, Any] = dict(pair.split("=", 1) for pair in options.set)
    if options.max_num_seqs is not None:
        settings["max_num_seqs"] = options.max_num_seqs
    with LLM(options.model, load_format=options.load_format, **settings) as llm:
        run(llm, options, 0)
        runs = [run(llm, options, seed) for seed in range(1, options.repeats + 1)]
    middle = {name: statistics.median(each[name] for each in runs) for name in runs[0]}
    print(
        f"{options.requests} x {options.input_len} in, {options.output_len} out: {middle['seconds']:.2f} s, "
        f"{middle['output_tokens_per_second']:.1f} tokens/s out, {middle['total_tokens_per_second']:.1f} in all"
    )
    if options.save:
        benchmark.save({**describe_machine(), "load": vars(options), "runs": runs, "median": middle}, options.save)


if __name__ == "__main__":
    main()
