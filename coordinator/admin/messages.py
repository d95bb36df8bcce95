"""Convert status and changes to protobuf messages and back."""

from dataclasses import asdict, fields

from coordinator.admin import admin_pb2 as pb
from coordinator.status import Change, SessionStatus, Status, WorkerStatus

SERVICE = "paceline.admin.v1.Admin"

_WORKER_FIELDS = [field.name for field in fields(WorkerStatus)]


def status_message(status: Status) -> pb.Status:
    message = pb.Status(
        term=status.term,
        epoch=status.epoch,
        uptime_s=status.uptime_s,
        endpoint=status.endpoint,
        rollout_step=-1 if status.rollout_step is None else status.rollout_step,
        rolling=status.rolling,
        paused=status.paused,
        settling=status.settling,
        threshold=status.threshold,
        drained_nodes=status.drained_nodes,
        counts=status.counts,
    )
    message.workers.extend(pb.Worker(**asdict(worker)) for worker in status.workers)
    message.sessions.extend(pb.Session(**asdict(session)) for session in status.sessions)
    return message


def status_record(message: pb.Status) -> Status:
    return Status(
        term=message.term,
        epoch=message.epoch,
        uptime_s=message.uptime_s,
        endpoint=message.endpoint,
        rollout_step=None if message.rollout_step < 0 else message.rollout_step,
        rolling=message.rolling,
        paused=message.paused,
        settling=message.settling,
        threshold=message.threshold,
        workers=tuple(
            WorkerStatus(**{name: getattr(worker, name) for name in _WORKER_FIELDS}) for worker in message.workers
        ),
        sessions=tuple(SessionStatus(s.group, s.number, s.epoch, tuple(s.members)) for s in message.sessions),
        drained_nodes=tuple(message.drained_nodes),
        counts=dict(message.counts),
    )


def change_message(change: Change) -> pb.Change:
    return pb.Change(**asdict(change))


def change_record(message: pb.Change) -> Change:
    return Change(
        at_s=message.at_s,
        worker=message.worker,
        group=message.group,
        before=message.before,
        after=message.after,
        reason=message.reason,
        session=message.session,
        epoch=message.epoch,
        members=tuple(message.members),
    )
