"""Prometheus metrics: vLLM's names where vLLM has one, `surefoot:` for what it does not count.

The engine's counts come out of its latest Snapshot when somebody scrapes; only what the API alone sees (latencies,
HTTP statuses, failed requests) is recorded as it happens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from surefoot.api.engine import Engine
from surefoot.api.memory import Memory
from surefoot.types import Sampled, Snapshot

_TTFT = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_ITL = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
_E2E = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_LABELS = ("model_name", "engine")

_GAUGES = (
    ("vllm:num_requests_running", "Sequences that run.", "running"),
    ("vllm:num_requests_waiting", "Sequences that wait.", "waiting"),
    ("surefoot:kv_blocks", "KV blocks there are.", "blocks_total"),
    ("surefoot:kv_blocks_used", "KV blocks in use.", "blocks_used"),
    ("surefoot:kv_blocks_idle", "KV blocks given back for want of work.", "blocks_idle"),
    ("surefoot:token_budget", "Tokens that a step may compute now.", "token_budget"),
    ("surefoot:suspects", "Sequences suspected of failed steps.", "suspects"),
)
_COUNTERS = (
    ("vllm:num_preemptions", "Preemptions by recompute.", "preemptions"),
    ("surefoot:steps", "Engine steps.", "steps"),
    ("surefoot:steps_oom", "Steps that ran out of memory, were rolled back and retried.", "steps_oom"),
    ("surefoot:steps_fault", "Steps that failed otherwise, were rolled back and retried.", "steps_fault"),
    ("surefoot:retries", "Plans rolled back, whose rows were tried again.", "retries"),
    ("surefoot:shrinks", "Times that the KV cache became smaller while serving.", "shrinks"),
    ("surefoot:kv_blocks_moved", "KV blocks in use that were moved for that.", "blocks_moved"),
    ("surefoot:control_steps", "Steps that tell a bad request from a bad device.", "control_steps"),
    ("surefoot:rows_failed", "Rows whose values were no numbers.", "rows_failed"),
    ("surefoot:requests_failed", "Requests that the engine failed.", "requests_failed"),
    ("surefoot:tokens_computed", "Positions computed.", "tokens_computed"),
    ("surefoot:tokens_emitted", "Tokens emitted by the engine.", "tokens_emitted"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
    ("surefoot:leaks_repaired", "Leaked blocks found when idle.", "leaks_repaired"),
)
"""Metric, help text and field of `types.Snapshot`."""


class Gain(Protocol):
    """What one choice gained in a step."""

    choice: int
    tokens: list[Sampled]
    finish: str | None


class Metrics:
    """One registry per app, so that several apps can live in one process."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model))
        labels = {"model_name": model, "engine": "0"}

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, _LABELS, registry=self._registry).labels(**labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, _LABELS, buckets=buckets, registry=self._registry).labels(**labels)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that emitted.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens emitted.")
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Between tokens of one choice.", _ITL)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _E2E)
        self.request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self.request_generation = histogram("vllm:request_generation_tokens", "Tokens per finished request.", _TOKENS)
        self._success = Counter(
            "vllm:request_success", "Finished choices.", (*_LABELS, "finished_reason"), registry=self._registry
        )
        self._errors = Counter(
            "surefoot:request_errors", "Error answers by type, in streams too.", ("type",), registry=self._registry
        )
        self._http = Counter(
            "surefoot:http_responses", "HTTP responses.", ("method", "route", "status"), registry=self._registry
        )
        self._labels = labels

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self._registry)

    def http(self, method: str, route: str, status: int) -> None:
        self._http.labels(method, route, str(status)).inc()

    def error(self, kind: str) -> None:
        self._errors.labels(kind).inc()

    def finished(self, reason: str) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def clock(self, arrival: float, prompt_tokens: int) -> RequestClock:
        return RequestClock(self, arrival, prompt_tokens)


class RequestClock:
    """Times one request; `arrival` in monotonic seconds."""

    def __init__(self, metrics: Metrics, arrival: float, prompt_tokens: int) -> None:
        self._metrics, self._arrival, self._prompt_tokens = metrics, arrival, prompt_tokens
        self._latest: dict[int, float] = {}
        self._tokens = 0

    def step(self, gains: Iterable[Gain]) -> None:
        now = time.monotonic()
        if not self._latest:
            self._metrics.ttft.observe(now - self._arrival)
            self._metrics.prompt_tokens.inc(self._prompt_tokens)
            self._metrics.request_prompt.observe(self._prompt_tokens)
        before = self._tokens
        for gain in gains:
            if (latest := self._latest.get(gain.choice)) is not None:
                self._metrics.itl.observe(now - latest)
            self._latest[gain.choice] = now
            self._tokens += len(gain.tokens)
            if gain.finish is not None:
                self._metrics.finished(gain.finish)
        self._metrics.generation_tokens.inc(self._tokens - before)

    def finished(self) -> None:
        self._metrics.e2e.observe(time.monotonic() - self._arrival)
        self._metrics.request_generation.observe(self._tokens)


class _EngineCollector(Collector):
    """Reads the engine's snapshot at scrape time."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._values = engine, (model, "0")
        self._memory = Memory(engine)

    def collect(self) -> Iterator[Metric]:
        snapshot, limits = self._engine.snapshot, self._engine.info.limits
        for name, text, field in _GAUGES:
            yield self._gauge(name, text, getattr(snapshot, field))
        for name, text, field in _COUNTERS:
            yield self._counter(name, text, getattr(snapshot, field))
        yield from self._memory_families(snapshot)
        usage = snapshot.blocks_used / limits.num_blocks if limits.num_blocks else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Used share of the KV cache, 0 to 1.", usage)
        yield self._gauge("vllm:gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.", usage)
        yield self._gauge("surefoot:sleeping", "1 while the worker is gone on purpose.", self._engine.sleeping)
        ready = (self._engine.alive or self._engine.sleeping) and not self._engine.draining and not self._engine.stalled
        yield self._gauge("surefoot:ready", "1 if new requests are served.", ready)
        yield self._counter("surefoot:worker_restarts", "Workers that died and were replaced.", self._engine.restarts)
        labels = ("block_size", "num_gpu_blocks", "engine")
        info = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is cut.", labels=labels)
        info.add_metric((str(limits.block_size), str(limits.num_blocks), "0"), 1)
        yield info

    def _memory_families(self, snapshot: Snapshot) -> Iterator[Metric]:
        """Where memory is, what is left of it, and what ran out."""
        rows = self._memory.rows()
        yield self._labelled(GaugeMetricFamily, "surefoot:memory_bytes", "Rows of the memory plan.", "row", rows)
        measured = {what: size for what, size in self._memory.measured().items() if isinstance(size, int)}
        text = "The device's memory: total, free, the worker's, the neighbours'."
        yield self._labelled(GaugeMetricFamily, "surefoot:device_memory_bytes", text, "what", measured)
        silent = snapshot.oom_predicted + snapshot.oom_library
        causes = {
            "allocation": snapshot.steps_oom - silent,
            "library": snapshot.oom_library,
            "predicted": snapshot.oom_predicted,
        }
        text = "Steps that ran out of memory: foreseen, at an allocation, or in a library's own words."
        yield self._labelled(CounterMetricFamily, "surefoot:oom", text, "cause", causes)

    def _labelled(
        self, family: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, label: str,
        values: Mapping[str, int],
    ) -> Metric:  # fmt: skip
        found = family(name, text, labels=(*_LABELS, label))
        for value, number in values.items():
            found.add_metric((*self._values, value), number)
        return found

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._values, float(value))
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._values, float(value))
        return family
