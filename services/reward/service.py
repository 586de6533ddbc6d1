"""Scoring as both the gRPC server and the stream worker see it: requests checked, pooled, counted."""

from __future__ import annotations

import json
import logging
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from pydantic import ValidationError

from services.reward.frames import Report
from services.reward.pool import Judged, VerifierPool
from services.reward.verifiers.base import Verifier
from services.reward.verifiers.registry import Registry, VerifierError
from trireme.contracts import rewards
from trireme.contracts.v1 import reward_pb2, sample_pb2

log = logging.getLogger(__name__)

# How often the rate of responses without an answer is judged, and from which rate it is worth a warning: a dataset
# and a verifier that expect different formats give rewards of 0 throughout, which look like a model that cannot learn.
RATE_WINDOW = 256
SUSPICIOUS_RATE = 0.9
LONGEST_SCHEMA = 2000  # characters in an error's text: gRPC carries it in a header, of which few KiB may be sent


class BadRequest(ValueError):
    """A request that no attempt could score; the text names the field and what would be right."""


class Metrics:
    """What the service counts."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.scores = Counter(
            "trireme_reward_scores_total", "Samples scored, by outcome.", ["verifier", "outcome"], registry=registry
        )
        self.failures = Counter(
            "trireme_reward_failures_total",
            "Infrastructure failures, by cause.",
            ["verifier", "cause"],
            registry=registry,
        )
        self.retries = Counter(
            "trireme_reward_retries_total", "Attempts beyond the first.", ["verifier"], registry=registry
        )
        self.no_answer = Counter(
            "trireme_reward_no_answer_total", "Responses in which no answer was found.", ["verifier"], registry=registry
        )
        self.no_answer_ratio = Gauge(
            "trireme_reward_no_answer_ratio", "Their share of the last window.", ["verifier"], registry=registry
        )
        self.seconds = Histogram(
            "trireme_reward_score_seconds", "Seconds of the attempt that counted.", ["verifier"], registry=registry
        )
        self.running = Gauge(
            "trireme_reward_running", "Samples being scored or waiting for a process.", registry=registry
        )


class Window:
    """Counts responses without an answer over a window of scores."""

    def __init__(self) -> None:
        self.seen = self.without = 0

    def add(self, extracted: bool) -> float | None:
        """The rate when this score completes a window."""
        self.seen += 1
        self.without += not extracted
        if self.seen < RATE_WINDOW:
            return None
        rate, self.seen, self.without = self.without / self.seen, 0, 0
        return rate


class Scoring:
    """Scores requests in the pool. One per service."""

    def __init__(self, verifiers: Registry, pool: VerifierPool, metrics: Metrics | None = None) -> None:
        self.verifiers, self.pool = verifiers, pool
        self.metrics = metrics or Metrics()
        self._windows: dict[str, Window] = {}

    def check(self, request: reward_pb2.ScoreRequest) -> Verifier:
        """The verifier that a request names. Raises BadRequest when it is unknown or the payload not of its schema."""
        try:
            verifier = self.verifiers.get(request.task.verifier)
        except VerifierError as error:
            raise BadRequest(f"task.verifier: {error}") from error
        try:
            verifier.schema.model_validate_json(request.task.payload_json)
        except ValidationError as error:
            raise BadRequest(_payload_problem(verifier, error)) from error
        return verifier

    async def score(self, request: reward_pb2.ScoreRequest) -> sample_pb2.Reward:
        """The reward of one request. Raises BadRequest."""
        verifier = self.check(request)
        with self.metrics.running.track_inprogress():
            judged = await self.pool.score(request)
        self._count(verifier.name, judged)
        return _reward(verifier, judged)

    def _count(self, name: str, judged: Judged) -> None:
        report = judged.report
        self.metrics.scores.labels(name, report.kind).inc()
        self.metrics.seconds.labels(name).observe(judged.seconds)
        self.metrics.retries.labels(name).inc(judged.attempts - 1)
        if report.kind == "infrastructure_failure":
            self.metrics.failures.labels(name, report.cause).inc()
        if report.kind == "score":
            self._count_answer(name, report)

    def _count_answer(self, name: str, report: Report) -> None:
        if not report.extracted:
            self.metrics.no_answer.labels(name).inc()
        rate = self._windows.setdefault(name, Window()).add(report.extracted)
        if rate is None:
            return
        self.metrics.no_answer_ratio.labels(name).set(rate)
        level = logging.WARNING if rate >= SUSPICIOUS_RATE else logging.INFO
        log.log(level, "%s: no answer extracted from %.0f%% of %d responses", name, 100 * rate, RATE_WINDOW)


def _payload_problem(verifier: Verifier, error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = ".".join(["task.payload_json", *map(str, first["loc"])])
    schema = schema_json(verifier)
    shown = schema if len(schema) <= LONGEST_SCHEMA else "in ListVerifiers"
    return f'{field}: {first["msg"]}; the schema of "{verifier.name}" is {shown}'


def schema_json(verifier: Verifier) -> str:
    schema: dict[str, Any] = verifier.schema.model_json_schema()
    return json.dumps(schema)


def _reward(verifier: Verifier, judged: Judged) -> sample_pb2.Reward:
    """The report as the contract writes it. A score of 0 is a score."""
    report, name, version = judged.report, verifier.name, verifier.version
    if report.kind == "score":
        return rewards.score(report.value, report.components, verifier=name, version=version)
    if report.kind == "policy_failure":
        return rewards.policy_failure(report.reason, verifier=name, version=version)
    return rewards.infrastructure_failure(report.reason, judged.attempts, verifier=name, version=version)
