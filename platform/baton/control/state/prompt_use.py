"""How much of a request's prompt was cached, out of what each of its legs says of its own prompt.

*Theory of operation.* A client's usage is that of its request, as if one engine had served it that
holds what all replicas of its route held when the request came. A leg knows less than that:

- The first leg that computes the whole prompt decides, be it a local or a prefill leg. Its replica
  took the prompt's front from its cache and computed the rest.
- Blocks that a decode leg pulls count as cached in its engine. They were computed for this very
  request, so a decode leg says nothing about a prompt that was handed off as a whole.
- A prefill leg of a front only (a prefix fetch) says how much of it its replica held. The leg that
  computes the rest decides: the longer of that front and of what its own cache held is cached.
- What follows is a second try. It finds what the first try computed, and its prompt may end with
  generated tokens; so nothing that it says changes what is known.

An engine that says nothing leaves it unknown: a later leg's figure would be another one.

Several answers to one prompt (n > 1) are requests of their own here, and may run on several
replicas. One engine would compute the prompt once, for the first of them; the others would find its
blocks. So the first that speaks says what its replica did, and the others what they would have
found after it (`SharedPrompts`). Only clients are told so: records keep what was computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from baton.domain.handoff import CacheUse, Leg, LegKind
from baton.domain.request import Request

_NOTHING_SAID = CacheUse()


class PromptUse(NamedTuple):
    """What is known so far."""

    cached_tokens: int
    """Tokens that were in a cache before the request came."""
    cache: CacheUse
    settled: bool
    """False while only a front of the prompt was looked at."""


def with_leg(
    known: PromptUse | None,
    leg: Leg,
    *,
    prompt_tokens: int,
    cached_tokens: int,
    cache: CacheUse | None,
) -> PromptUse | None:
    """What is known once a leg's engine has said what it did not compute.

    Args:
        known: What the legs before it have said.
        leg: The leg.
        prompt_tokens: The length of the request's own prompt.
        cached_tokens: Tokens of the leg's prompt that its engine did not compute.
        cache: More of that, where the engine knows it.
    """
    if leg.resumed_tokens or (known is not None and known.settled):
        return known
    external_tokens, created_tokens = cache or _NOTHING_SAID
    pulls = leg.kind is LegKind.DECODE
    settled = pulls or len(leg.prompt_token_ids) >= prompt_tokens
    if known is None:
        if pulls:
            return None
        return PromptUse(cached_tokens, CacheUse(external_tokens, created_tokens), settled)
    own_tokens = cached_tokens
    if pulls:
        # Without a word on where its tokens came from, all of them may be those that it pulled.
        own_tokens = 0 if cache is None else cached_tokens - external_tokens
        external_tokens = 0
    held_tokens = max(known.cached_tokens, own_tokens)
    if known.cached_tokens >= own_tokens:
        external_tokens = known.cache.external_tokens
    if created_tokens:
        # The leg counts from the end of what it pulled, which is a token more than was held.
        created_tokens = max(0, cached_tokens + created_tokens - held_tokens)
    else:
        created_tokens = known.cache.created_tokens
    return PromptUse(held_tokens, CacheUse(external_tokens, created_tokens), settled)


class SharedPrompts:
    """What clients are told of prompts to which they asked for several answers."""

    def __init__(self) -> None:
        self._answers: Counter[str] = Counter()
        """How many answers to each prompt are in flight."""
        self._first: dict[str, PromptUse] = {}
        """What the first of them that spoke has said."""

    def began(self, request: Request) -> None:
        """A request has arrived."""
        if request.parent_id is not None:
            self._answers[request.parent_id] += 1

    def ended(self, request: Request) -> None:
        """A request has ended."""
        if request.parent_id is None:
            return
        self._answers[request.parent_id] -= 1
        if not self._answers[request.parent_id]:
            del self._answers[request.parent_id]
            self._first.pop(request.parent_id, None)

    def told(self, request: Request, use: PromptUse, *, block_size_tokens: int) -> PromptUse:
        """What to tell the client of a request about which this much is known.

        Args:
            request: The request, of which nothing was told yet.
            use: What its own legs have said.
            block_size_tokens: Of the engine that runs it.
        """
        if request.parent_id is None:
            return use
        first = self._first.setdefault(request.parent_id, use)
        if first is use:
            return use
        # As in an engine, the last token is always computed, and with it the rest of its block.
        most_tokens = max(0, len(request.prompt_token_ids) - 1)
        most_tokens -= most_tokens % block_size_tokens
        kept_tokens = first.cached_tokens + first.cache.created_tokens
        found_tokens = min(kept_tokens, most_tokens)
        if found_tokens <= use.cached_tokens:
            return use
        external_tokens, created_tokens = use.cache
        kept_tokens = use.cached_tokens + created_tokens if created_tokens else 0
        cache = CacheUse(external_tokens, max(0, kept_tokens - found_tokens))
        return use._replace(cached_tokens=found_tokens, cache=cache)

    def check_integrity(self, in_flight: Iterable[Request]) -> None:
        """Raise AssertionError when answers are counted that are not in flight, or are not."""
        counted = Counter(one.parent_id for one in in_flight if one.parent_id is not None)
        assert counted == self._answers, f"answers: counted {self._answers}, wanted {counted}"
        assert self._first.keys() <= counted.keys(), "prompts whose answers have ended"
