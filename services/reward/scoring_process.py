"""One process of the pool: reads requests, runs verifiers, reports. Started as `python -m`, killed without notice.

It inherits nothing from the service but two pipes and an environment without Redis's address, so a verifier cannot
disturb gRPC or Redis there, and a fork after gRPC threads exist (which hangs) never happens.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import BinaryIO

from services.reward.frames import BEGIN, HEADER, Report, encode, frame
from services.reward.verifiers.base import (
    InfrastructureFailure,
    Outcome,
    PolicyFailure,
    Request,
    Score,
    Verifier,
)
from services.reward.verifiers.registry import Registry
from services.reward.verifiers.text import strip_end_tokens
from trireme.contracts.v1 import reward_pb2, sample_pb2

PR_SET_PDEATHSIG = 1
MIB = 1 << 20


def request_of(message: reward_pb2.ScoreRequest, verifier: Verifier) -> Request:
    """The request as the verifier sees it. Raises pydantic.ValidationError for a payload of another shape."""
    return Request(
        payload=verifier.schema.model_validate_json(message.task.payload_json),
        response_text=strip_end_tokens(message.response_text),
        prompt_text=message.prompt_text,
        finish_reason=sample_pb2.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower(),
    )


def report_of(outcome: Outcome | object) -> Report:
    """The report of what a verifier returned; anything but a sound outcome is an error that says what it was."""
    if isinstance(outcome, PolicyFailure):
        return Report("policy_failure", reason=outcome.reason)
    if isinstance(outcome, InfrastructureFailure):
        return Report("infrastructure_failure", reason=outcome.reason, cause="verifier")
    if not isinstance(outcome, Score):
        wanted = "Score, PolicyFailure or InfrastructureFailure"
        return Report("error", reason=f"the verifier returned {_shown(outcome)} instead of {wanted}", cause="invalid")
    try:
        value = float(outcome.value)
        components = {str(k): float(v) for k, v in outcome.components.items()}
    except (TypeError, ValueError, AttributeError) as error:
        return Report("error", reason=f"the verifier's score is not a number: {error}", cause="invalid")
    bad = [n for n, v in {"value": value, **components}.items() if not math.isfinite(v)]
    if bad:
        return Report("error", reason=f"the verifier's score has a {bad[0]} that is not finite", cause="invalid")
    return Report("score", value=value, components=components, extracted=bool(outcome.extracted))


def _shown(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def judge(verifier: Verifier, message: reward_pb2.ScoreRequest) -> Report:
    """One attempt; whatever the verifier raises becomes an error report."""
    try:
        return report_of(verifier.score(request_of(message, verifier)))
    except MemoryError:
        return Report("error", reason="the verifier ran out of memory", cause="memory")
    except BaseException as error:  # verifiers may raise anything, TimeoutException of math-verify included
        return Report("error", reason=f"{type(error).__name__}: {error}"[:500], cause="exception")


def loaded(verifier: Verifier) -> Report | None:
    """Import what the verifier needs, outside its time limit; None when that went well."""
    load = getattr(verifier, "load", None)
    if load is None:
        return None
    try:
        load()
    except BaseException as error:  # an import may raise anything
        return Report("error", reason=f"cannot load: {type(error).__name__}: {error}"[:500], cause="load")
    return None


def send(stream: BinaryIO, data: bytes) -> None:
    stream.write(frame(data))
    stream.flush()


def read_exactly(stream: BinaryIO, size: int) -> bytes | None:
    """`size` bytes, or None at the end of the stream."""
    data = stream.read(size)
    return data if len(data) == size else None


def serve(verifiers: Registry, requests: BinaryIO, reports: BinaryIO) -> None:
    """Answer requests until their stream ends."""
    while (header := read_exactly(requests, HEADER.size)) is not None:
        data = read_exactly(requests, HEADER.unpack(header)[0])
        if data is None:
            return
        message = reward_pb2.ScoreRequest.FromString(data)
        verifier = verifiers.get(message.task.verifier)
        problem = loaded(verifier)
        send(reports, BEGIN)
        report = problem or judge(verifier, message)
        send(reports, encode(report))


def limit_memory(mib: int) -> None:
    if mib:
        resource.setrlimit(resource.RLIMIT_AS, (mib * MIB, mib * MIB))


def die_with(parent: int) -> None:
    """Leave nothing behind: the kernel kills this process when the service dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def private_pipe() -> BinaryIO:
    """The pipe for reports; what verifiers print goes to standard error instead."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    os.set_inheritable(pipe, False)
    return os.fdopen(pipe, "wb")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="a scoring process; started by the reward service")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--memory-mib", type=int, default=0)
    parser.add_argument("verifiers", nargs="*")
    args = parser.parse_args(argv)
    die_with(args.parent)
    reports = private_pipe()
    limit_memory(args.memory_mib)
    serve(Registry(args.verifiers), sys.stdin.buffer, reports)


if __name__ == "__main__":
    main()
