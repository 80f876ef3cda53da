"""The frames of the fleet link: the messages of each side, with their bounds. `codec` encodes them.

`Open`, `Accept` and `Close` tolerate fields appended by later versions, so that a version mismatch
is reported as such; all others are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple

import msgspec

from baton.domain import cache
from baton.domain.fleet import LinkTotals, Load, LossReason, ReplicaFacts, Role
from baton.domain.handoff import KvHandle, Leg, LegFailure, LegOutput

PROTOCOL_VERSION: Final = 9
"""Changes whenever a frame changes its meaning or shape."""

MAX_ID_CHARS: Final = 512
MAX_REASON_CHARS: Final = 4096
MAX_SALT_CHARS: Final = 4096
"""Clients choose cache salts."""
MAX_IDS_IN_FRAME: Final = 65_536
MAX_CHANGES_IN_FRAME: Final = 1024
"""A cache update has each kind of change at most once for a tier."""

COUNT_MAX: Final = 2**31 - 1

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_CHARS)]
ReasonText = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]
Salt = Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
LegIds = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_IDS_IN_FRAME)]


class CloseReason(StrEnum):
    """Why a side ends or refuses a session."""

    CLOSED = "closed"
    """It shuts down."""
    ENGINE_DEAD = "engine_dead"
    NO_SESSION = "no_session"
    """The other side has no session; it may send `Open` again."""
    UNRESPONSIVE = "unresponsive"
    """The other side missed the heartbeat timeout."""
    REPLACED = "replaced"
    """The same coordinator opened a newer session."""
    BAD_FRAME = "bad_frame"
    PROTOCOL_MISMATCH = "protocol_mismatch"
    """The protocol versions differ."""
    TOO_MANY_COORDINATORS = "too_many_coordinators"
    """The replica has `max_coordinators` sessions."""


LOSS_REASONS: Final[Mapping[CloseReason, LossReason]] = MappingProxyType(
    {
        CloseReason.CLOSED: LossReason.LEFT,
        CloseReason.ENGINE_DEAD: LossReason.ENGINE_DEAD,
        CloseReason.UNRESPONSIVE: LossReason.UNRESPONSIVE,
        CloseReason.NO_SESSION: LossReason.OUT_OF_SYNC,
        CloseReason.REPLACED: LossReason.OUT_OF_SYNC,
        CloseReason.BAD_FRAME: LossReason.OUT_OF_SYNC,
        CloseReason.PROTOCOL_MISMATCH: LossReason.OUT_OF_SYNC,
        CloseReason.TOO_MANY_COORDINATORS: LossReason.OUT_OF_SYNC,
    }
)
"""The cause of a lost session, by the reason of a replica's `Close`."""


class Open(msgspec.Struct, array_like=True, frozen=True):
    """Coordinator: open a session. Sent again when unanswered, without effect."""

    protocol: int
    coordinator_id: Name
    session_id: Name


class Accept(msgspec.Struct, array_like=True, frozen=True):
    """Replica: the session is open; the replica's facts."""

    protocol: int
    session_id: Name
    facts: ReplicaFacts


class Close(msgspec.Struct, array_like=True, frozen=True):
    """Either side: the session is over."""

    reason: CloseReason
    detail: ReasonText = ""


class Submit(NamedTuple):
    """Coordinator: start a leg."""

    leg: Leg


class Abort(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Coordinator: stop legs; `Aborted` answers each id, known or not."""

    leg_ids: LegIds


class Release(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Coordinator: no replica will pull this KV handle's blocks."""

    tokens: Count
    blocks: Count
    params: bytes

    @property
    def kv_handle(self) -> KvHandle:
        """The KV handle."""
        return KvHandle(tokens=self.tokens, blocks=self.blocks, params=self.params)


class CoordinatorBeat(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Coordinator: heartbeat."""


class SyncCache(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Coordinator: send a snapshot of the prefix cache."""


class CheckSideChannel(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Coordinator: check whether blocks could be pulled from another replica."""

    source_id: Name
    address: Name


class AgentBroken(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Coordinator: you pull from no source, though others do; get replaced."""

    reason: ReasonText


class ReplicaBeat(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Replica: heartbeat with the load."""

    load: Load
    draining: bool
    received_legs: Annotated[int, msgspec.Meta(ge=0)]
    """Legs that this session has received; the load includes them."""


class RoleChanged(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Replica: I have another role from now on; my existing work finishes.

    `epoch` counts the role changes of this replica's life; an older epoch is ignored.
    """

    role: Role
    epoch: Annotated[int, msgspec.Meta(ge=1)]


class Step(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Replica: output of one engine step for one session's legs; `seq` counts from 1."""

    seq: Annotated[int, msgspec.Meta(ge=1)]
    outputs: tuple[LegOutput, ...]


class LegFailed(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Replica: a leg ended without its engine finishing it."""

    leg_id: Name
    failure: LegFailure
    reason: ReasonText = ""


class Aborted(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Replica: these legs no longer run; no later `Step` has output of them."""

    leg_ids: LegIds


class CacheUpdate(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Replica: the changes of the prefix cache, or its whole content."""

    update: cache.CacheUpdate

    def __post_init__(self) -> None:
        """Refuse a block hash cut in two, and more changes than a replica sends."""
        changes = self.update.changes
        if self.update.sequence < 0:
            raise ValueError(f"update {self.update.sequence}, expected a number from 0 on")
        if len(changes) > MAX_CHANGES_IN_FRAME:
            raise ValueError(f"{len(changes)} changes, expected at most {MAX_CHANGES_IN_FRAME}")
        for change in changes:
            if len(change.packed_hashes) % cache.BLOCK_HASH_BYTES:
                raise ValueError(
                    f"hashes of {len(change.packed_hashes)} bytes, expected a multiple of"
                    f" {cache.BLOCK_HASH_BYTES}"
                )


class LinkReport(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Replica: its pulls so far, from sources with news."""

    links: Annotated[tuple[LinkTotals, ...], msgspec.Meta(max_length=MAX_IDS_IN_FRAME)]


class SideChannelChecked(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Replica: the answer to `CheckSideChannel`."""

    source_id: Name
    is_reachable: bool
    elapsed_s: float
    reason: ReasonText = ""


FromCoordinator = (
    Open
    | Submit
    | Abort
    | Release
    | CoordinatorBeat
    | SyncCache
    | CheckSideChannel
    | AgentBroken
    | Close
)
FromReplica = (
    Accept
    | Step
    | LegFailed
    | Aborted
    | ReplicaBeat
    | RoleChanged
    | CacheUpdate
    | LinkReport
    | SideChannelChecked
    | Close
)
Frame = FromCoordinator | FromReplica
