from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_new_tokens", "stop_token_ids", "stop_strings", "seed", "ignore_eos")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    ignore_eos: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop_strings: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class PromptRef(_message.Message):
    __slots__ = ("dataset", "split", "index", "epoch")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    split: str
    index: int
    epoch: int
    def __init__(self, dataset: _Optional[str] = ..., split: _Optional[str] = ..., index: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("verifier", "payload_json")
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_JSON_FIELD_NUMBER: _ClassVar[int]
    verifier: str
    payload_json: str
    def __init__(self, verifier: _Optional[str] = ..., payload_json: _Optional[str] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("group_id", "num_samples", "token_ids", "text", "sampling", "ref", "task", "trace_id", "admitted_version", "min_weight_version")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    MIN_WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    num_samples: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    sampling: SamplingParams
    ref: PromptRef
    task: Task
    trace_id: str
    admitted_version: int
    min_weight_version: int
    def __init__(self, group_id: _Optional[str] = ..., num_samples: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., ref: _Optional[_Union[PromptRef, _Mapping]] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., trace_id: _Optional[str] = ..., admitted_version: _Optional[int] = ..., min_weight_version: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("start", "length")
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    start: int
    length: int
    def __init__(self, start: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("start", "length", "version")
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    start: int
    length: int
    version: int
    def __init__(self, start: _Optional[int] = ..., length: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("id", "group_id", "group_index", "group_size", "prompt_token_ids", "response_token_ids", "log_probs", "versions", "loss_spans", "finish_reason", "ref", "task", "trace_id", "prompt_text", "response_text", "reward", "temperature", "rollout_server", "admitted_version")
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    LOSS_SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TEXT_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_SERVER_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    id: str
    group_id: str
    group_index: int
    group_size: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    response_token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    versions: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    loss_spans: _containers.RepeatedCompositeFieldContainer[Span]
    finish_reason: FinishReason
    ref: PromptRef
    task: Task
    trace_id: str
    prompt_text: str
    response_text: str
    reward: Reward
    temperature: float
    rollout_server: str
    admitted_version: int
    def __init__(self, id: _Optional[str] = ..., group_id: _Optional[str] = ..., group_index: _Optional[int] = ..., group_size: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., response_token_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ..., versions: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., loss_spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., ref: _Optional[_Union[PromptRef, _Mapping]] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., trace_id: _Optional[str] = ..., prompt_text: _Optional[str] = ..., response_text: _Optional[str] = ..., reward: _Optional[_Union[Reward, _Mapping]] = ..., temperature: _Optional[float] = ..., rollout_server: _Optional[str] = ..., admitted_version: _Optional[int] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("value", "components")
    class ComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUE_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    value: float
    components: _containers.ScalarMap[str, float]
    def __init__(self, value: _Optional[float] = ..., components: _Optional[_Mapping[str, float]] = ...) -> None: ...

class PolicyFailure(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class InfrastructureFailure(_message.Message):
    __slots__ = ("reason", "attempts")
    REASON_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    attempts: int
    def __init__(self, reason: _Optional[str] = ..., attempts: _Optional[int] = ...) -> None: ...

class Reward(_message.Message):
    __slots__ = ("score", "policy_failure", "infrastructure_failure", "verifier", "verifier_version")
    SCORE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FAILURE_FIELD_NUMBER: _ClassVar[int]
    INFRASTRUCTURE_FAILURE_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_VERSION_FIELD_NUMBER: _ClassVar[int]
    score: Score
    policy_failure: PolicyFailure
    infrastructure_failure: InfrastructureFailure
    verifier: str
    verifier_version: str
    def __init__(self, score: _Optional[_Union[Score, _Mapping]] = ..., policy_failure: _Optional[_Union[PolicyFailure, _Mapping]] = ..., infrastructure_failure: _Optional[_Union[InfrastructureFailure, _Mapping]] = ..., verifier: _Optional[str] = ..., verifier_version: _Optional[str] = ...) -> None: ...
