"""What a scoring process makes of what verifiers return and raise."""

from __future__ import annotations

import io
import json
import math

import pytest

from services.reward.frames import BEGIN, HEADER, Report, decode, encode, frame
from services.reward.scoring_process import report_of, serve
from services.reward.verifiers.base import InfrastructureFailure, Outcome, PolicyFailure, Score
from services.reward.verifiers.registry import Registry
from trireme.contracts.v1 import reward_pb2, sample_pb2


@pytest.mark.parametrize(
    ("outcome", "report"),
    [
        (Score(0.0), Report("score", value=0.0)),
        (Score(1, {"a": 0}, extracted=False), Report("score", value=1.0, components={"a": 0.0}, extracted=False)),
        (PolicyFailure("forbidden"), Report("policy_failure", reason="forbidden")),
        (InfrastructureFailure("no gold"), Report("infrastructure_failure", reason="no gold", cause="verifier")),
    ],
)
def test_outcomes(outcome: Outcome, report: Report) -> None:
    """R-25: a score of 0 stays a score."""
    assert report_of(outcome) == report
    assert decode(encode(report)) == report


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (None, "None"),
        (1.0, "a float"),
        ("1", "a str"),
        (Score(math.nan), "value"),
        (Score(math.inf), "value"),
        (Score(1.0, {"style": -math.inf}), "style"),
        (Score("much"), "much"),  # type: ignore[arg-type]
        (Score(None), "not a number"),  # type: ignore[arg-type]
        (Score(1.0, [1]), "not a number"),  # type: ignore[arg-type]
    ],
)
def test_nonsense_is_an_error_that_says_what_it_was(outcome: object, said: str) -> None:
    """R-28: what is not a sound outcome is never turned into 0."""
    report = report_of(outcome)
    assert (report.kind, report.cause) == ("error", "invalid")
    assert said in report.reason


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"kind": "score", "surprise": 1}', b"\xff"])
def test_what_is_no_report_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


def frames(data: bytes) -> list[bytes]:
    stream, found = io.BytesIO(data), []
    while header := stream.read(HEADER.size):
        found.append(stream.read(HEADER.unpack(header)[0]))
    return found


def test_each_request_gets_a_beginning_and_a_report() -> None:
    """R-22: one report for each request, in their order."""
    task = sample_pb2.Task(verifier="exact", payload_json=json.dumps({"answer": "42"}))
    requests = [reward_pb2.ScoreRequest(id=text, task=task, response_text=text) for text in ("42", "", "42</s>", "7")]
    reports = io.BytesIO()
    serve(Registry(), io.BytesIO(b"".join(frame(r.SerializeToString()) for r in requests)), reports)
    answers = frames(reports.getvalue())
    assert answers[::2] == [BEGIN] * 4
    assert [decode(a).value for a in answers[1::2]] == [1.0, 0.0, 1.0, 0.0]
