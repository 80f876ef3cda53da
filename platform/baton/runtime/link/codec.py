"""The strict, bounded encoding of the fleet link's frames.

Theory of operation: a frame is a ZMQ multipart message `[kind, body, blob...]`: one byte, a
MessagePack array, and for `Submit` two blobs. These are the prompt's token ids as little-endian
int32, and the payload that only engines read. So a prompt of 100,000 tokens is copied as 400 kB and
never walked as MessagePack integers. Block hashes travel as bytes, too. There is one decoder for
each direction, which raises `BadFrame` and nothing else for other input.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, TypeVar

import msgspec

from baton.domain.errors import BatonError
from baton.domain.handoff import Leg, LegKind
from baton.runtime.link.frames import (
    COUNT_MAX,
    PROTOCOL_VERSION,
    Abort,
    Aborted,
    Accept,
    AgentBroken,
    CacheUpdate,
    CheckSideChannel,
    Close,
    CoordinatorBeat,
    Count,
    Frame,
    FromCoordinator,
    FromReplica,
    LegFailed,
    LinkReport,
    Name,
    Open,
    Release,
    ReplicaBeat,
    RoleChanged,
    Salt,
    SideChannelChecked,
    Step,
    Submit,
    SyncCache,
)

REPLICA_PARTS: Final = 2
"""Kind and body: the parts of each frame but `Submit`."""
_TOKEN_BYTES: Final = 4


class BadFrame(BatonError):
    """Bytes that are no frame, or a frame of the other direction."""

    def __init__(self, kind: bytes, reason: str) -> None:
        super().__init__(kind, reason)
        self.kind = kind
        self.reason = reason

    def __str__(self) -> str:
        return f"bad frame of kind {self.kind[:8]!r}: {self.reason}"


class _SubmitHead(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    leg_id: Name
    request_id: Name
    kind: LegKind
    resumed_tokens: Count
    max_tokens: Count
    min_tokens: Count
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=COUNT_MAX)]
    kv_handle: Release | None
    source_id: Name | None
    cache_salt: Salt | None
    adapter: Name | None
    emits_first_token: bool
    uncached_tokens: Count | None


class _Versioned(msgspec.Struct, array_like=True, frozen=True):
    protocol: int


_KINDS: Final[Mapping[type, bytes]] = {
    Open: b"H",
    Submit: b"S",
    Abort: b"A",
    Release: b"R",
    CoordinatorBeat: b"c",
    SyncCache: b"Y",
    CheckSideChannel: b"K",
    AgentBroken: b"B",
    Close: b"G",
    Accept: b"W",
    Step: b"T",
    LegFailed: b"F",
    Aborted: b"X",
    ReplicaBeat: b"r",
    RoleChanged: b"o",
    CacheUpdate: b"U",
    LinkReport: b"L",
    SideChannelChecked: b"k",
}
_VERSIONED: Final = frozenset({_KINDS[Open], _KINDS[Accept]})
_SUBMIT: Final = _KINDS[Submit]

# Encoders and decoders keep no state between calls.
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_VERSION: Final = msgspec.msgpack.Decoder(_Versioned)
_SUBMIT_HEAD: Final = msgspec.msgpack.Decoder(_SubmitHead)
_FROM_COORDINATOR: Final[
    Mapping[
        bytes,
        msgspec.msgpack.Decoder[
            Open
            | Abort
            | Release
            | CoordinatorBeat
            | SyncCache
            | CheckSideChannel
            | AgentBroken
            | Close
        ],
    ]
] = {
    _KINDS[Open]: msgspec.msgpack.Decoder(Open),
    _KINDS[Abort]: msgspec.msgpack.Decoder(Abort),
    _KINDS[Release]: msgspec.msgpack.Decoder(Release),
    _KINDS[CoordinatorBeat]: msgspec.msgpack.Decoder(CoordinatorBeat),
    _KINDS[SyncCache]: msgspec.msgpack.Decoder(SyncCache),
    _KINDS[CheckSideChannel]: msgspec.msgpack.Decoder(CheckSideChannel),
    _KINDS[AgentBroken]: msgspec.msgpack.Decoder(AgentBroken),
    _KINDS[Close]: msgspec.msgpack.Decoder(Close),
}
_FROM_REPLICA: Final[Mapping[bytes, msgspec.msgpack.Decoder[FromReplica]]] = {
    _KINDS[Step]: msgspec.msgpack.Decoder(Step),
    _KINDS[ReplicaBeat]: msgspec.msgpack.Decoder(ReplicaBeat),
    _KINDS[RoleChanged]: msgspec.msgpack.Decoder(RoleChanged),
    _KINDS[LegFailed]: msgspec.msgpack.Decoder(LegFailed),
    _KINDS[Aborted]: msgspec.msgpack.Decoder(Aborted),
    _KINDS[CacheUpdate]: msgspec.msgpack.Decoder(CacheUpdate),
    _KINDS[LinkReport]: msgspec.msgpack.Decoder(LinkReport),
    _KINDS[SideChannelChecked]: msgspec.msgpack.Decoder(SideChannelChecked),
    _KINDS[Accept]: msgspec.msgpack.Decoder(Accept),
    _KINDS[Close]: msgspec.msgpack.Decoder(Close),
}

_Decoded = TypeVar("_Decoded")


class ProtocolMismatch(BadFrame):
    """The peer uses another version of this protocol."""

    def __init__(self, kind: bytes, peer_version: int) -> None:
        super().__init__(kind, mismatch_message(peer_version=peer_version))
        self.args = (kind, peer_version)
        self.peer_version = peer_version


def mismatch_message(*, peer_version: int, own_version: int = PROTOCOL_VERSION) -> str:
    """Return one line for an operator."""
    return (
        f"the peer uses fleet link protocol {peer_version}, expected {own_version};"
        " run the same version of baton on every node"
    )


def encode(frame: Frame) -> list[bytes]:
    """Return the parts of a frame.

    Raises:
        ValueError: the other side would not accept a leg, a release or a check. Clients choose
            request ids and salts, so this must not cost the session.
    """
    if isinstance(frame, Submit):
        return _encode_submit(frame.leg)
    body = _ENCODE(frame)
    if isinstance(frame, Release | CheckSideChannel):
        _FROM_COORDINATOR[_KINDS[type(frame)]].decode(body)
    return [_KINDS[type(frame)], body]


def decode_from_coordinator(parts: Sequence[bytes]) -> FromCoordinator:
    """Return the frame that a coordinator sent.

    Raises:
        ProtocolMismatch: its `Open` has another version.
        BadFrame: it is no frame, or only replicas send it.
    """
    if parts and parts[0] == _SUBMIT:
        return _decode_submit(parts)
    return _decode(parts, _FROM_COORDINATOR)


def decode_from_replica(parts: Sequence[bytes]) -> FromReplica:
    """Return the frame that a replica sent.

    Raises:
        ProtocolMismatch: its answer has another version.
        BadFrame: it is no frame, or only coordinators send it.
    """
    return _decode(parts, _FROM_REPLICA)


def _decode(
    parts: Sequence[bytes], decoders: Mapping[bytes, msgspec.msgpack.Decoder[_Decoded]]
) -> _Decoded:
    kind = parts[0] if parts else b""
    decoder = decoders.get(kind)
    if decoder is None:
        raise BadFrame(kind, "unknown in this direction")
    if len(parts) != REPLICA_PARTS:
        raise BadFrame(kind, f"{len(parts)} parts, expected {REPLICA_PARTS}")
    if kind in _VERSIONED:
        _check_version(kind, parts[1])
    return _unpack(kind, parts[1], decoder)


def _check_version(kind: bytes, body: bytes) -> None:
    peer_version = _unpack(kind, body, _VERSION).protocol
    if peer_version != PROTOCOL_VERSION:
        raise ProtocolMismatch(kind, peer_version)


def _unpack(kind: bytes, body: bytes, decoder: msgspec.msgpack.Decoder[_Decoded]) -> _Decoded:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        # ValueError covers msgspec's own errors and undecodable text; RecursionError, deep nesting.
        raise BadFrame(kind, str(error)) from error


def _encode_submit(leg: Leg) -> list[bytes]:
    kv_handle = leg.kv_handle
    head = _SubmitHead(
        leg_id=leg.leg_id,
        request_id=leg.request_id,
        kind=leg.kind,
        resumed_tokens=leg.resumed_tokens,
        max_tokens=leg.max_tokens,
        min_tokens=leg.min_tokens,
        priority=leg.priority,
        kv_handle=None
        if kv_handle is None
        else Release(kv_handle.tokens, kv_handle.blocks, kv_handle.params),
        source_id=leg.source_id,
        cache_salt=leg.cache_salt,
        adapter=leg.adapter,
        emits_first_token=leg.emits_first_token,
        uncached_tokens=leg.uncached_tokens,
    )
    body = _ENCODE(head)
    _SUBMIT_HEAD.decode(body)
    return [_SUBMIT, body, pack_tokens(leg.prompt_token_ids), leg.payload]


def _decode_submit(parts: Sequence[bytes]) -> Submit:
    if len(parts) != 4:  # noqa: PLR2004 - kind, head, prompt, payload
        raise BadFrame(_SUBMIT, f"{len(parts)} parts, expected 4")
    head = _unpack(_SUBMIT, parts[1], _SUBMIT_HEAD)
    try:
        leg = Leg(
            leg_id=head.leg_id,
            request_id=head.request_id,
            kind=head.kind,
            prompt_token_ids=unpack_tokens(parts[2]),
            resumed_tokens=head.resumed_tokens,
            max_tokens=head.max_tokens,
            min_tokens=head.min_tokens,
            priority=head.priority,
            kv_handle=head.kv_handle.kv_handle if head.kv_handle else None,
            source_id=head.source_id,
            cache_salt=head.cache_salt,
            adapter=head.adapter,
            emits_first_token=head.emits_first_token,
            uncached_tokens=head.uncached_tokens,
            payload=parts[3],
        )
    except ValueError as error:
        raise BadFrame(_SUBMIT, str(error)) from error
    return Submit(leg)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32.

    Raises:
        ValueError: an id is negative or does not fit.
    """
    try:
        packed = array("i", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"prompt token ids: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    blob = packed.tobytes()
    _check_ids(blob)
    return blob


def unpack_tokens(blob: bytes) -> tuple[int, ...]:
    """Return the token ids of a blob.

    Raises:
        ValueError: its length is no multiple of four, or an id is negative.
    """
    if len(blob) % _TOKEN_BYTES:
        raise ValueError(f"prompt of {len(blob)} bytes, expected a multiple of {_TOKEN_BYTES}")
    _check_ids(blob)
    return tuple(_decode_ids(blob))


def _decode_ids(blob: bytes) -> array[int]:
    packed = array("i")
    packed.frombytes(blob)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def _check_ids(blob: bytes) -> None:
    # Of a number below zero the highest byte is above 127. A prompt has many ids, and this looks
    # at all of them at once.
    if not blob[_TOKEN_BYTES - 1 :: _TOKEN_BYTES].isascii():
        raise ValueError(f"prompt holds the negative token id {min(_decode_ids(blob))}")
