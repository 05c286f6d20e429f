"""Generate without a server: the same engine, in a worker process of this script's own."""

from surefoot import LLM, SamplingParams

with LLM("smollm2", memory="2GiB") as llm:
    prompts = ["The capital of France is", "Water boils at"]
    for result in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
        if result.error is None:
            print(repr(result.prompt), "→", repr(result.outputs[0].text))
        else:  # this prompt alone
            print(repr(result.prompt), "failed:", result.error)
