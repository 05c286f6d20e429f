"""What structured output costs: tokens per second of 32 streams with a JSON schema, over those without, side by side.

    python -m bench.structured [--streams 32] [--tokens 96] [--rounds 7]

Rounds alternate, so that whatever else the machine does meets both alike; the medians are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time

from msgspec.structs import replace

from surefoot import LLM, SamplingParams, grammar
from surefoot.types import Grammar

SCHEMA = {
    "type": "array",
    "minItems": 40,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "mood": {"enum": ["glad", "sad", "indifferent"]},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        },
        "required": ["name", "age", "mood", "tags"],
        "additionalProperties": False,
    },
}


def rate(llm: LLM, streams: int, tokens: int, what: Grammar | None) -> float:
    """Output tokens per second of one round."""
    same = SamplingParams(temperature=0.7, max_tokens=tokens, ignore_eos=True, grammar=what)
    params = [replace(same, seed=at) for at in range(streams)]
    prompts = [f"People of town {at}, as a JSON array:\n" for at in range(streams)]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    made = sum(len(each.outputs[0].token_ids) for each in outputs)
    return made / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    llm = LLM(asked.model, max_num_seqs=asked.streams)
    schema = grammar.json_schema(SCHEMA, field="schema")
    found: dict[str, list[float]] = {"plain": [], "structured": []}
    for at in range(asked.rounds + 1):
        for name, what in (("plain", None), ("structured", schema)):
            speed = rate(llm, asked.streams, asked.tokens, what)
            if at:  # the first round warms up
                found[name].append(speed)
    plain, structured = (statistics.median(found[name]) for name in ("plain", "structured"))
    pairs = statistics.median(b / a for a, b in zip(found["plain"], found["structured"], strict=True))
    print(f"plain {plain:.0f} tok/s, structured {structured:.0f} tok/s, ratio of medians {structured / plain:.3f}, "
          f"median of ratios {pairs:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
