"""Which roles a replica can play."""

from __future__ import annotations

from baton.domain.errors import RoleUnsupported
from baton.domain.fleet import ReplicaFacts, Role


def parse_role(replica_id: str, name: str) -> Role:
    """The role of that name.

    Raises:
        RoleUnsupported: there is none.
    """
    try:
        return Role(name)
    except ValueError:
        raise RoleUnsupported(
            f"replica {replica_id} cannot become {name!r:.60}: there is no such role",
            f"give one of {', '.join(Role)}",
        ) from None


def check_role(facts: ReplicaFacts, role: Role) -> None:
    """Refuse a role that a replica's engine cannot play: a prefill replica needs a side channel.

    Raises:
        RoleUnsupported: saying why, with a remedy.
    """
    if role is Role.PREFILL and not facts.side_channel:
        raise RoleUnsupported(
            f"replica {facts.replica_id} cannot become {role}: its engine has no side channel, so"
            " no replica could pull its blocks",
            "start it with a connector that hands blocks over",
        )
