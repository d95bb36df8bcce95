from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("every_s",)
    EVERY_S_FIELD_NUMBER: _ClassVar[int]
    every_s: float
    def __init__(self, every_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker", "node", "reason")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker: str
    node: str
    reason: str
    def __init__(self, worker: _Optional[str] = ..., node: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class SetThresholdRequest(_message.Message):
    __slots__ = ("idle_workers",)
    IDLE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    idle_workers: int
    def __init__(self, idle_workers: _Optional[int] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("name", "incarnation", "node", "group", "state", "phase", "session", "running", "step", "in_state_s", "silent_s", "drained", "rests_s", "trainer_failures")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    IN_STATE_S_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    RESTS_S_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FAILURES_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    node: str
    group: str
    state: str
    phase: str
    session: int
    running: int
    step: int
    in_state_s: float
    silent_s: float
    drained: bool
    rests_s: float
    trainer_failures: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., node: _Optional[str] = ..., group: _Optional[str] = ..., state: _Optional[str] = ..., phase: _Optional[str] = ..., session: _Optional[int] = ..., running: _Optional[int] = ..., step: _Optional[int] = ..., in_state_s: _Optional[float] = ..., silent_s: _Optional[float] = ..., drained: _Optional[bool] = ..., rests_s: _Optional[float] = ..., trainer_failures: _Optional[int] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("group", "number", "epoch", "members")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    group: str
    number: int
    epoch: int
    members: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, group: _Optional[str] = ..., number: _Optional[int] = ..., epoch: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("term", "epoch", "uptime_s", "endpoint", "rollout_step", "rolling", "paused", "settling", "threshold", "workers", "sessions", "drained_nodes", "counts")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TERM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_STEP_FIELD_NUMBER: _ClassVar[int]
    ROLLING_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    SETTLING_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DRAINED_NODES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    term: int
    epoch: int
    uptime_s: float
    endpoint: str
    rollout_step: int
    rolling: bool
    paused: bool
    settling: bool
    threshold: int
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    drained_nodes: _containers.RepeatedScalarFieldContainer[str]
    counts: _containers.ScalarMap[str, int]
    def __init__(self, term: _Optional[int] = ..., epoch: _Optional[int] = ..., uptime_s: _Optional[float] = ..., endpoint: _Optional[str] = ..., rollout_step: _Optional[int] = ..., rolling: _Optional[bool] = ..., paused: _Optional[bool] = ..., settling: _Optional[bool] = ..., threshold: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ..., drained_nodes: _Optional[_Iterable[str]] = ..., counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("at_s", "worker", "group", "before", "after", "reason", "session", "epoch", "members")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    worker: str
    group: str
    before: str
    after: str
    reason: str
    session: int
    epoch: int
    members: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, at_s: _Optional[float] = ..., worker: _Optional[str] = ..., group: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ..., reason: _Optional[str] = ..., session: _Optional[int] = ..., epoch: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ...) -> None: ...

class Update(_message.Message):
    __slots__ = ("status", "change")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    status: Status
    change: Change
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., change: _Optional[_Union[Change, _Mapping]] = ...) -> None: ...
