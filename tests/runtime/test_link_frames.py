from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.cache import (
    CacheChange,
    CacheChangeKind,
    CacheGroup,
    CacheShape,
    CacheTier,
    CacheUpdate,
    PrefixRequirement,
    pack_hashes,
)
from baton.domain.fleet import (
    AdapterStatus,
    LinkTotals,
    Load,
    ReplicaFacts,
    Role,
    StepTotals,
    TransferTotals,
)
from baton.domain.handoff import CacheUse, KvHandle, Leg, LegFailure, LegKind, LegOutput, LegTimes
from baton.domain.request import FinishReason
from baton.runtime.link import codec, frames
from baton.runtime.link.codec import BadFrame
from baton.runtime.link.frames import CloseReason
from baton.runtime.link.options import LinkOptions
from tests.fakes.scripted_engine import make_leg

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
counts = st.integers(0, 2**31 - 1)
token_ids = st.lists(counts, max_size=40).map(tuple)
tickets = st.builds(KvHandle, tokens=counts, blocks=counts, params=st.binary(max_size=60))
floats = st.floats(allow_nan=False)


@st.composite
def legs(draw: st.DrawFn) -> Leg:
    kind = draw(st.sampled_from(LegKind))
    return Leg(
        leg_id=draw(names),
        request_id=draw(names),
        kind=kind,
        prompt_token_ids=draw(token_ids),
        resumed_tokens=draw(counts),
        max_tokens=draw(counts),
        min_tokens=draw(counts),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        kv_handle=draw(tickets) if kind is LegKind.DECODE else None,
        source_id=draw(st.none() | names),
        cache_salt=draw(st.none() | st.text(max_size=40)),
        adapter=draw(st.none() | names),
        emits_first_token=kind is LegKind.PREFILL and draw(st.booleans()),
        uncached_tokens=draw(st.none() | counts),
        payload=draw(st.binary(max_size=200)),
    )


outputs = st.builds(
    LegOutput,
    leg_id=names,
    token_ids=token_ids,
    finish=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | st.integers(-(2**63), 2**63 - 1) | names,
    kv_handle=st.none() | tickets,
    cached_tokens=st.none() | counts,
    engine_payload=st.none() | st.binary(max_size=60),
    times=st.none() | st.builds(LegTimes, floats, floats, counts),
    cache_use=st.none() | st.builds(CacheUse, counts, counts),
)
loads = st.builds(
    Load,
    queued_requests=counts,
    running_requests=counts,
    queued_tokens=counts,
    kv_used_fraction=floats,
    step_s=floats,
    transfers=st.builds(TransferTotals, counts, counts, floats, counts, counts, counts),
    pulling_requests=counts,
    steps=st.builds(StepTotals, counts, floats, *[counts] * 5),
    cache_sequence=counts,
    adapters=st.builds(
        AdapterStatus, st.lists(names, max_size=3).map(tuple), counts, counts, floats
    ),
)
cache_changes = st.builds(
    CacheChange,
    kind=st.sampled_from(CacheChangeKind),
    packed_hashes=st.lists(st.integers(0, 2**60 - 1), max_size=20).map(pack_hashes),
    tier=st.sampled_from(CacheTier),
)
cache_updates = st.builds(
    CacheUpdate,
    sequence=counts,
    changes=st.lists(cache_changes, max_size=6).map(tuple),
    is_snapshot=st.booleans(),
)
links = st.builds(LinkTotals, names, counts, counts, floats, counts, names)
shapes = st.builds(
    CacheShape,
    st.lists(
        st.builds(CacheGroup, st.sampled_from(PrefixRequirement), counts, counts, st.booleans())
    ).map(tuple),
    counts,
)
facts = st.builds(
    ReplicaFacts,
    replica_id=names,
    pool=names,
    role=st.sampled_from(Role),
    model=names,
    engine=names,
    engine_version=names,
    block_size_tokens=counts,
    kv_blocks=counts,
    kv_block_bytes=counts,
    max_len_tokens=counts,
    max_running_requests=counts,
    max_batched_tokens=counts,
    layout=names,
    side_channel=st.text(max_size=30),
    cache_events=st.booleans(),
    supports_prefix_fetch=st.booleans(),
    host_blocks=counts,
    devices=floats,
    max_batched_tokens_while_decoding=st.none() | counts,
    cache_shape=st.none() | shapes,
)
id_lists = st.lists(names, max_size=10).map(tuple)
goodbyes = st.builds(frames.Close, st.sampled_from(CloseReason), st.text(max_size=50))
from_coordinator = st.one_of(
    st.builds(frames.Open, st.just(frames.PROTOCOL_VERSION), names, names),
    st.builds(frames.Submit, legs()),
    st.builds(frames.Abort, id_lists),
    st.builds(frames.Release, counts, counts, st.binary(max_size=60)),
    st.just(frames.CoordinatorBeat()),
    st.just(frames.SyncCache()),
    st.builds(frames.CheckSideChannel, names, names),
    st.builds(frames.AgentBroken, st.text(max_size=50)),
    goodbyes,
)
from_replica = st.one_of(
    st.builds(frames.Accept, st.just(frames.PROTOCOL_VERSION), names, facts),
    st.builds(frames.Step, st.integers(1, 2**63), st.lists(outputs, max_size=8).map(tuple)),
    st.builds(frames.LegFailed, names, st.sampled_from(LegFailure), st.text(max_size=50)),
    st.builds(frames.Aborted, id_lists),
    st.builds(frames.ReplicaBeat, loads, st.booleans(), counts),
    st.builds(frames.RoleChanged, st.sampled_from(Role), st.integers(1, 2**63)),
    st.builds(frames.CacheUpdate, cache_updates),
    st.builds(frames.LinkReport, st.lists(links, max_size=5).map(tuple)),
    st.builds(frames.SideChannelChecked, names, st.booleans(), floats, st.text(max_size=50)),
    goodbyes,
)


@given(from_coordinator)
def test_frames_of_a_coordinator_arrive_unchanged(frame: frames.FromCoordinator) -> None:
    assert codec.decode_from_coordinator(codec.encode(frame)) == frame


@given(from_replica)
def test_frames_of_a_replica_arrive_unchanged(frame: frames.FromReplica) -> None:
    assert codec.decode_from_replica(codec.encode(frame)) == frame


def decode_or_refuse(parts: Sequence[bytes]) -> None:
    """Anything but a frame or a BadFrame is an error of the test."""
    for decode in (codec.decode_from_coordinator, codec.decode_from_replica):
        try:
            decode(parts)
        except BadFrame as error:
            assert len(str(error)) < 10_000  # noqa: PT017 - either outcome is fine, a crash is not


kinds = b"HSARcYKGWTFXroULk"


@given(st.lists(st.binary(max_size=80), max_size=6))
def test_random_parts_are_refused_or_decoded_but_never_crash(parts: list[bytes]) -> None:
    decode_or_refuse(parts)


@given(st.sampled_from(kinds), st.lists(st.binary(max_size=80), max_size=4))
def test_random_bodies_of_known_kinds_never_crash(kind: int, parts: list[bytes]) -> None:
    decode_or_refuse([bytes([kind]), *parts])


@given(st.one_of(from_coordinator, from_replica), st.data())
def test_mutated_frames_never_crash(frame: frames.Frame, data: st.DataObject) -> None:
    parts = [bytearray(part) for part in codec.encode(frame)]
    for _ in range(data.draw(st.integers(1, 4))):
        part = data.draw(st.sampled_from(parts))
        if part:
            part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse([bytes(part) for part in parts])


@given(st.one_of(from_coordinator, from_replica), st.data())
def test_truncated_bodies_are_refused(frame: frames.Frame, data: st.DataObject) -> None:
    parts = codec.encode(frame)
    if len(parts[1]) < 2:
        return
    parts[1] = parts[1][: data.draw(st.integers(0, len(parts[1]) - 1))]
    decode = codec.decode_from_coordinator if parts[0] in b"HSARcYKG" else codec.decode_from_replica
    with pytest.raises(BadFrame):
        decode(parts)


@given(from_replica)
def test_a_replicas_frame_is_refused_from_a_coordinator(frame: frames.FromReplica) -> None:
    if not isinstance(frame, frames.Close):
        with pytest.raises(BadFrame):
            codec.decode_from_coordinator(codec.encode(frame))


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b""],
        [b"c"],
        [b"c", b"\x90", b"more"],
        [b"c", b"\x90\x90"],
        [b"Y", b"\x91\x01"],
        [b"K", msgspec.msgpack.encode(["", "host:1"])],
        [b"K", msgspec.msgpack.encode(["p0", "x" * (frames.MAX_ID_CHARS + 1)])],
        [b"A", b"\x91" * 100_000],
        [b"A", b"\xdd\xff\xff\xff\xff"],
        [b"S", b"\x90", b""],
        [b"A", b"\x92\x90\x90"],
        [b"A", msgspec.msgpack.encode([[""]])],
        [b"A", msgspec.msgpack.encode([["x" * (frames.MAX_ID_CHARS + 1)]])],
        [b"A", msgspec.msgpack.encode([["x"] * (frames.MAX_IDS_IN_FRAME + 1)])],
    ],
)
def test_malformed_frames_are_refused(parts: list[bytes]) -> None:
    with pytest.raises(BadFrame):
        codec.decode_from_coordinator(parts)


@pytest.mark.parametrize("body", [[], ["decode"], ["cook", 1], ["decode", 0], ["decode", 1, 2]])
def test_a_malformed_change_of_role_is_refused(body: list[object]) -> None:
    with pytest.raises(BadFrame):
        codec.decode_from_replica([b"o", msgspec.msgpack.encode(body)])


@pytest.mark.parametrize(
    "update",
    [
        [1, [["stored", b"1234567", "gpu"]], False],
        [1, [["gained", b"", "gpu"]], False],
        [1, [["stored", b"", "tape"]], False],
        [1, [["cleared"]] * (frames.MAX_CHANGES_IN_FRAME + 1), False],
        [-1, [], False],
        [1],
    ],
)
def test_a_malformed_cache_update_is_refused(update: list[object]) -> None:
    with pytest.raises(BadFrame):
        codec.decode_from_replica([b"U", msgspec.msgpack.encode([update])])


def test_a_snapshot_of_a_million_blocks_fits_into_one_frame() -> None:
    change = CacheChange(CacheChangeKind.STORED, pack_hashes(range(1_000_000)))
    frame = frames.CacheUpdate(CacheUpdate(7, (change,), is_snapshot=True))
    parts = codec.encode(frame)
    assert max(map(len, parts)) < LinkOptions().max_part_bytes // 8
    assert codec.decode_from_replica(parts) == frame


@pytest.mark.parametrize("check", [("", "host:1"), ("p0", ""), ("p0", "x" * 10_000)])
def test_a_check_that_the_other_side_would_refuse_is_not_encoded(check: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        codec.encode(frames.CheckSideChannel(*check))


@pytest.mark.parametrize("nesting", [100, 1_000_000])
def test_deep_nesting_is_refused(nesting: int) -> None:
    with pytest.raises(BadFrame):
        codec.decode_from_replica([b"T", b"\x92\x01" + b"\x91" * nesting])


def test_another_protocol_version_is_named_together_with_ours() -> None:
    body = msgspec.msgpack.encode([frames.PROTOCOL_VERSION + 1, {"new": "shape"}])
    with pytest.raises(
        codec.ProtocolMismatch, match=f"protocol {frames.PROTOCOL_VERSION + 1}"
    ) as caught:
        codec.decode_from_coordinator([b"H", body])
    assert f"expected {frames.PROTOCOL_VERSION}" in str(caught.value)
    with pytest.raises(codec.ProtocolMismatch):
        codec.decode_from_replica([b"W", body])


def test_a_hello_with_fields_of_a_later_version_is_understood() -> None:
    body = msgspec.msgpack.encode([frames.PROTOCOL_VERSION, "c", "s", "later", 3])
    assert codec.decode_from_coordinator([b"H", body]) == frames.Open(
        frames.PROTOCOL_VERSION, "c", "s"
    )


def test_a_long_prompt_travels_as_four_bytes_a_token() -> None:
    leg = make_leg("a", prompt=(258,) * 1000, max_tokens=1)
    parts = codec.encode(frames.Submit(leg))
    assert parts[2] == b"\x02\x01\x00\x00" * 1000
    assert len(parts[1]) < 100


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": (2**31,)},
        {"prompt_token_ids": (-1,)},
        {"leg_id": ""},
        {"leg_id": "x" * 10_000},
        {"leg_id": "\ud800"},
        {"max_tokens": 2**40},
        {"priority": 2**40},
        {"source_id": ""},
        {"cache_salt": "x" * (frames.MAX_SALT_CHARS + 1)},
    ],
)
def test_a_leg_that_the_other_side_would_refuse_is_not_encoded(changes: dict[str, object]) -> None:
    sound = Leg(leg_id="a", request_id="a", kind=LegKind.LOCAL, prompt_token_ids=(), max_tokens=1)
    fields = {name: getattr(sound, name) for name in Leg.__struct_fields__}
    with pytest.raises(ValueError, match=r".+"):
        codec.encode(frames.Submit(Leg(**(fields | changes))))


def test_a_prompt_of_broken_length_is_refused() -> None:
    leg = Leg(leg_id="a", request_id="a", kind=LegKind.LOCAL, prompt_token_ids=(1,), max_tokens=1)
    kind, head, prompt, payload = codec.encode(frames.Submit(leg))
    with pytest.raises(BadFrame, match="multiple of 4"):
        codec.decode_from_coordinator([kind, head, prompt[:-1], payload])


def test_a_decode_leg_without_a_kv_handle_is_refused() -> None:
    head = msgspec.msgpack.encode(
        ["a", "a", "decode", 0, 1, 0, 0, None, None, None, None, False, None]
    )
    with pytest.raises(BadFrame, match="KV handle"):
        codec.decode_from_coordinator([b"S", head, b"", b""])


# ---------- what comes from outside is never unpickled: code that could is in one known place
PLATFORM = Path(__file__).parents[2] / "platform" / "baton"
RUNS_WHAT_IT_READS = re.compile(
    r"^\s*(?:import|from)\s+(pickle|cloudpickle|dill|joblib|marshal|shelve|jsonpickle)\b"
    r"|\b(recv_pyobj|send_pyobj|unsafe_load|full_load)\("
    r"|(?<![\w.])(eval|exec)\(",
    re.MULTILINE,
)
FROM_RAYS_OWN_CALLS = frozenset({"serving/ray/packing.py"})
"""Whoever can make those can run code on every node anyway."""


def dangerous(source: str) -> set[str]:
    """Modules and calls in a source by which bytes could become code."""
    return {name for found in RUNS_WHAT_IT_READS.findall(source) for name in found if name}


def test_only_what_ray_itself_carries_is_unpickled() -> None:
    found = {
        str(path.relative_to(PLATFORM))
        for path in PLATFORM.rglob("*.py")
        if dangerous(path.read_text())
    }
    assert found == FROM_RAYS_OWN_CALLS


def test_a_module_that_unpickles_would_be_found() -> None:
    assert dangerous("import pickle") == {"pickle"}
    assert dangerous("from cloudpickle import loads") == {"cloudpickle"}
    assert dangerous("socket.recv_pyobj()") == {"recv_pyobj"}
    assert dangerous("eval(text)") == {"eval"}
    assert dangerous("import json; json.loads(b''); model.eval()") == set()
