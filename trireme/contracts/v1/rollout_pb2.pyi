from trireme.contracts.v1 import sample_pb2 as _sample_pb2
from trireme.contracts.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "stream_tokens")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    STREAM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt: _sample_pb2.Prompt
    stream_tokens: bool
    def __init__(self, prompt: _Optional[_Union[_sample_pb2.Prompt, _Mapping]] = ..., stream_tokens: _Optional[bool] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("group_index", "token_ids", "log_probs")
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    group_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, group_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("delta", "sample")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    delta: TokenDelta
    sample: _sample_pb2.Sample
    def __init__(self, delta: _Optional[_Union[TokenDelta, _Mapping]] = ..., sample: _Optional[_Union[_sample_pb2.Sample, _Mapping]] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("manifest", "in_flight")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    manifest: _weights_pb2.WeightManifest
    in_flight: bool
    def __init__(self, manifest: _Optional[_Union[_weights_pb2.WeightManifest, _Mapping]] = ..., in_flight: _Optional[bool] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("version", "fetch_s", "load_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    version: int
    fetch_s: float
    load_s: float
    def __init__(self, version: _Optional[int] = ..., fetch_s: _Optional[float] = ..., load_s: _Optional[float] = ...) -> None: ...

class RolloutStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RolloutStatus(_message.Message):
    __slots__ = ("name", "model", "weight_version", "running", "waiting", "generated_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    weight_version: int
    running: int
    waiting: int
    generated_tokens: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., weight_version: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...
