"""The keys of one deployment's fleet links: only their owners may use a link.

Theory of operation: CURVE (ZMQ's CurveZMQ, by libsodium) encrypts and authenticates links. All
replicas of a deployment have one key pair, and all its coordinators another. A coordinator must
know the replicas' public key to connect; a replica asks its `authenticator` about the coordinator's
key. Both sides make new keys for each connection, so a recorded conversation cannot be replayed.
ZMQ's I/O thread encrypts, so that no event loop waits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final, Self

import zmq

ZAP_DOMAIN: Final = "baton"
"""With a domain, ZMQ refuses connections while no ZAP handler answers."""
ENCRYPTION_OVERHEAD_BYTES: Final = 33
"""Bytes that encryption adds to a part. Source: MESSAGE of CurveZMQ (ZMQ's RFC 26)."""
_KEY_CHARS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetKeys:
    """The secret halves of both pairs, in Z85."""

    replica_secret: bytes = field(repr=False)
    coordinator_secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        for secret in (self.replica_secret, self.coordinator_secret):
            if len(secret) != _KEY_CHARS:
                raise ValueError(f"a link key has {len(secret)} characters, expected {_KEY_CHARS}")

    @classmethod
    def generate(cls) -> Self:
        """New random keys."""
        (_, replica), (_, coordinator) = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(replica_secret=replica, coordinator_secret=coordinator)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Keys as `to_bytes` has them.

        Raises:
            ValueError: these are none; the text shows nothing of them.
        """
        try:
            replica, coordinator = json.loads(data)
            return cls(replica_secret=replica.encode(), coordinator_secret=coordinator.encode())
        except (ValueError, TypeError, AttributeError):
            # Not chained: the cause would show what was read.
            raise ValueError("the link keys cannot be read, expected two texts") from None

    def to_bytes(self) -> bytes:
        """The keys as bytes; secret."""
        pair = [self.replica_secret.decode(), self.coordinator_secret.decode()]
        return json.dumps(pair).encode()

    @property
    def coordinator_public(self) -> bytes:
        """The public key of coordinators, in Z85."""
        return zmq.curve_public(self.coordinator_secret)

    def apply_curve(self, socket: zmq.Socket[Any]) -> None:
        """Encrypt and authenticate a socket; call before bind or connect."""
        if socket.type == zmq.ROUTER:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.replica_secret)
            socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(self.replica_secret))
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.coordinator_secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.coordinator_public)
