from trireme.contracts.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreRequest(_message.Message):
    __slots__ = ("id", "task", "prompt_text", "response_text", "finish_reason", "trace_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    task: _sample_pb2.Task
    prompt_text: str
    response_text: str
    finish_reason: _sample_pb2.FinishReason
    trace_id: str
    def __init__(self, id: _Optional[str] = ..., task: _Optional[_Union[_sample_pb2.Task, _Mapping]] = ..., prompt_text: _Optional[str] = ..., response_text: _Optional[str] = ..., finish_reason: _Optional[_Union[_sample_pb2.FinishReason, str]] = ..., trace_id: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("id", "reward")
    ID_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    id: str
    reward: _sample_pb2.Reward
    def __init__(self, id: _Optional[str] = ..., reward: _Optional[_Union[_sample_pb2.Reward, _Mapping]] = ...) -> None: ...

class ListVerifiersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifierInfo(_message.Message):
    __slots__ = ("name", "version", "payload_schema_json", "stateless")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    STATELESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    payload_schema_json: str
    stateless: bool
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., payload_schema_json: _Optional[str] = ..., stateless: _Optional[bool] = ...) -> None: ...

class ListVerifiersResponse(_message.Message):
    __slots__ = ("verifiers",)
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    verifiers: _containers.RepeatedCompositeFieldContainer[VerifierInfo]
    def __init__(self, verifiers: _Optional[_Iterable[_Union[VerifierInfo, _Mapping]]] = ...) -> None: ...
