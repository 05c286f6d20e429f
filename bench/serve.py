"""The jobs of docs/performance.md against any OpenAI-compatible server: medians of three runs, one table row each.

    python bench/serve.py http://127.0.0.1:8000/v1 --jobs cpu --save bench/results/surefoot.json
    python bench/serve.py http://127.0.0.1:8000/v1 --jobs eight --repeats 1

Run two servers one after the other, never at once, and compare what one session measured: a shared machine drifts.
For loads of your own there is `surefoot bench serve`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from typing import Any

from surefoot.api import benchmark
from surefoot.errors import SurefootError

JOBS: dict[str, dict[str, Any]] = {
    "one": {"requests": 1, "concurrency": 1, "input_len": 128, "output_len": 128},
    "eight": {"requests": 8, "concurrency": 8, "input_len": 128, "output_len": 128},
    "long": {"requests": 4, "concurrency": 4, "input_len": 1500, "output_len": 32},
    "gpu-one": {"requests": 4, "concurrency": 1, "input_len": 128, "output_len": 256},
    "gpu-32": {"requests": 64, "concurrency": 32, "input_len": 512, "output_len": 128},
    "gpu-256": {"requests": 512, "concurrency": 256, "input_len": 1024, "output_len": 128},
    "gpu-8k": {"requests": 1, "concurrency": 1, "input_len": 8192, "output_len": 2},
    "gpu-32k": {"requests": 1, "concurrency": 1, "input_len": 32768, "output_len": 2},
    "gpu-100k": {"requests": 1, "concurrency": 1, "input_len": 100_000, "output_len": 2},
    "gpu-prefix": {"requests": 4, "concurrency": 1, "input_len": 32768, "prefix_len": 32704, "output_len": 2},
}
SETS = {
    "cpu": ["one", "eight", "long"],
    "gpu": [name for name in JOBS if name.startswith("gpu-")],
}


def row(name: str, result: dict[str, Any]) -> str:
    """One line of the table: output tokens per second, TTFT and ITL in milliseconds."""
    middle = result["median"]
    ttft, itl = middle["ttft_ms"] or {}, middle["itl_ms"] or {}
    numbers = (middle["output_tokens_per_second"], ttft.get("p50", float("nan")), itl.get("p50", float("nan")))
    failed = sum(run["failed"] for run in result["runs"])
    return f"| {name} | {numbers[0]:.1f} | {numbers[1]:.0f} | {numbers[2]:.1f} | {failed} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--jobs", default="cpu", help=f"comma-separated, of {', '.join([*SETS, *JOBS])}")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--token-ids", type=int, metavar="VOCABULARY", help="random token ids in place of words")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="default: another each time")
    parser.add_argument("--save", help="JSON file for the results by job")
    options = parser.parse_args()
    names = [name for given in options.jobs.split(",") for name in SETS.get(given, [given])]
    if unknown := set(names) - set(JOBS):
        parser.error(f"there is no job {', '.join(sorted(unknown))}")
    key = os.environ.get("SUREFOOT_API_KEY")
    results = {}
    try:
        model = options.model or benchmark.first_model(options.url, key)
        print("| job | out tok/s | TTFT p50 ms | ITL p50 ms | failed |\n|---|---|---|---|---|")
        for name in names:
            load = benchmark.Load(
                url=options.url, model=model, vocabulary=options.token_ids, seed=options.seed, **JOBS[name]
            )
            results[name] = benchmark.measure(load, repeats=options.repeats, api_key=key)
            print(row(name, results[name]), flush=True)
        if options.save:
            benchmark.save(results, options.save)
    except SurefootError as error:
        sys.exit(f"bench/serve.py: {error.message}")


if __name__ == "__main__":
    main()
