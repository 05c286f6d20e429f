"""The names that programs written for vLLM import, of both of its eras.

    from surefoot.vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams      # was: from vllm import …

Old spellings (`generate(inputs=…)`, `worker_use_ray`, `disable_log_requests`, `best_of`, `use_beam_search=False`,
`AsyncEngineDeadError`) are taken; an argument that changes nothing here is told once in the log, and one that cannot be
honoured is an error that says why.
"""

from __future__ import annotations

from surefoot.api.local import Logprob
from surefoot.api.vllm_args import AsyncEngineArgs, EngineArgs
from surefoot.api.vllm_engine import (
    LLM,
    AsyncEngineDeadError,
    AsyncLLM,
    AsyncLLMEngine,
    EngineDeadError,
    EngineGenerateError,
)
from surefoot.api.vllm_outputs import CompletionOutput, RequestMetrics, RequestOutput
from surefoot.api.vllm_params import GuidedDecodingParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncEngineDeadError",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "EngineDeadError",
    "EngineGenerateError",
    "GuidedDecodingParams",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
