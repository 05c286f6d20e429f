"""A service that somebody wrote for vLLM in 2024: FastAPI around an AsyncLLMEngine. Only the import was changed.

MODEL_PATH=./glm-4-9b-chat python examples/vllm_service.py
"""

import gc
import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from surefoot.vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

MODEL_PATH = os.environ.get("MODEL_PATH", "smollm2")
MAX_MODEL_LENGTH = int(os.environ.get("MAX_MODEL_LENGTH", "2048"))
PORT = int(os.environ.get("PORT", "8000"))

app = FastAPI()


async def generate(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The text so far and the usage so far, again and again."""
    tokenizer = await engine.get_tokenizer()
    inputs = tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True, tokenize=False)
    sampling_params = SamplingParams(
        n=1,
        best_of=1,
        presence_penalty=1.0,
        frequency_penalty=0.0,
        temperature=request.get("temperature", 0.8),
        top_p=request.get("top_p", 0.8),
        top_k=-1,
        repetition_penalty=1.1,
        use_beam_search=False,
        length_penalty=1,
        early_stopping=False,
        ignore_eos=False,
        max_tokens=request.get("max_tokens", 64),
        logprobs=None,
        prompt_logprobs=None,
        skip_special_tokens=True,
    )
    try:
        async for output in engine.generate(
            inputs=inputs, sampling_params=sampling_params, request_id=f"{time.time()}"
        ):
            prompt_tokens = len(output.prompt_token_ids)
            completion_tokens = len(output.outputs[0].token_ids)
            yield {
                "text": output.outputs[0].text,
                "usage": {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": completion_tokens,
                    "total_tokens": prompt_tokens + completion_tokens,
                },
                "finish_reason": output.outputs[0].finish_reason,
            }
    finally:
        gc.collect()


async def stream(request: dict[str, Any]) -> AsyncIterator[str]:
    """What is new each time, as server-sent events."""
    shown = ""
    async for response in generate(request):
        delta, shown = response["text"][len(shown) :], response["text"]
        choice = {"index": 0, "delta": {"content": delta}, "finish_reason": response["finish_reason"]}
        yield f"data: {json.dumps({'choices': [choice], 'usage': response['usage']})}\n\n"
    yield "data: [DONE]\n\n"


@app.post("/v1/chat/completions", response_model=None)
async def chat(request: dict[str, Any]) -> dict[str, Any] | StreamingResponse:
    if request.get("stream"):
        return StreamingResponse(stream(request), media_type="text/event-stream")
    response: dict[str, Any] = {}
    async for response in generate(request):  # noqa: B007 - the last one holds everything
        pass
    message = {"role": "assistant", "content": response["text"].strip()}
    choice = {"index": 0, "message": message, "finish_reason": response["finish_reason"]}
    return {"object": "chat.completion", "choices": [choice], "usage": response["usage"]}


if __name__ == "__main__":
    engine_args = AsyncEngineArgs(
        model=MODEL_PATH,
        tokenizer=MODEL_PATH,
        tensor_parallel_size=1,
        dtype="bfloat16",
        trust_remote_code=True,
        gpu_memory_utilization=0.4,
        enforce_eager=True,
        worker_use_ray=False,
        disable_log_requests=True,
        max_model_len=MAX_MODEL_LENGTH,
    )
    engine = AsyncLLMEngine.from_engine_args(engine_args)
    uvicorn.run(app, host="127.0.0.1", port=PORT, workers=1)
