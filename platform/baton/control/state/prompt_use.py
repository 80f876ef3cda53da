"""How many tokens of a request's prompt were cached, from the counts of each of its legs.

*Theory of operation.* A client's usage is that of its request, as if one engine had served it: with
the blocks that all replicas of its route held on arrival. Legs report less than that:

- The first leg that computes the whole prompt decides, local or prefill.
- Blocks that a decode leg pulls count as cached in its engine. They were computed for this request,
  so a decode leg shows nothing about a prompt that was handed off as a whole.
- A prefill leg of a prefix fetch reports how much of the front its replica held. The leg that
  computes the rest decides: the longer of that front and of its own cached part.
- Later legs are retries, which find blocks of the first try. They change no known count.

Without a report the count stays unknown: a later leg's count would be another one.

Several answers to one prompt (n > 1) are separate requests here. One engine would compute the
prompt once, and the others would find its blocks. So the first leg reports its replica's count, the
others report the blocks they would have found after it (`SharedPrompts`). Only clients get these
counts; records keep what was computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from baton.domain.handoff import CacheUse, Leg, LegKind
from baton.domain.request import Request

_NO_CACHE_USE = CacheUse()


class PromptUse(NamedTuple):
    """The known counts so far."""

    cached_tokens: int
    """Tokens that were in a cache before the request came."""
    cache_use: CacheUse
    is_final: bool
    """False while only a front of the prompt was looked at."""


def use_after_leg(
    prior: PromptUse | None,
    leg: Leg,
    *,
    prompt_tokens: int,
    cached_tokens: int,
    cache_use: CacheUse | None,
) -> PromptUse | None:
    """The known counts after a leg's engine has reported its cached tokens.

    Args:
        prior: The counts of the legs before it.
        leg: The leg.
        prompt_tokens: The length of the request's own prompt.
        cached_tokens: Tokens of the leg's prompt that its engine did not compute.
        cache_use: More of that, where the engine knows it.
    """
    if leg.resumed_tokens or (prior is not None and prior.is_final):
        return prior
    external_tokens, created_tokens = cache_use or _NO_CACHE_USE
    is_decode = leg.kind is LegKind.DECODE
    is_final = is_decode or len(leg.prompt_token_ids) >= prompt_tokens
    if prior is None:
        if is_decode:
            return None
        return PromptUse(cached_tokens, CacheUse(external_tokens, created_tokens), is_final)
    local_tokens = cached_tokens
    if is_decode:
        # Without a word on where its tokens came from, all of them may be those that it pulled.
        local_tokens = 0 if cache_use is None else cached_tokens - external_tokens
        external_tokens = 0
    hit_tokens = max(prior.cached_tokens, local_tokens)
    if prior.cached_tokens >= local_tokens:
        external_tokens = prior.cache_use.external_tokens
    if created_tokens:
        # The leg counts from the end of the pulled tokens, which is a token more than was held.
        created_tokens = max(0, cached_tokens + created_tokens - hit_tokens)
    else:
        created_tokens = prior.cache_use.created_tokens
    return PromptUse(hit_tokens, CacheUse(external_tokens, created_tokens), is_final)


class SharedPrompts:
    """The usage that clients see for prompts with several answers."""

    def __init__(self) -> None:
        self._in_flight_counts: Counter[str] = Counter()
        """How many answers to each prompt are in flight."""
        self._first_use: dict[str, PromptUse] = {}
        """The counts of the first leg that reported."""

    def on_arrived(self, request: Request) -> None:
        """A request has arrived."""
        if request.fan_out_id is not None:
            self._in_flight_counts[request.fan_out_id] += 1

    def on_ended(self, request: Request) -> None:
        """A request has ended."""
        if request.fan_out_id is None:
            return
        self._in_flight_counts[request.fan_out_id] -= 1
        if not self._in_flight_counts[request.fan_out_id]:
            del self._in_flight_counts[request.fan_out_id]
            self._first_use.pop(request.fan_out_id, None)

    def client_use(self, request: Request, use: PromptUse, *, block_size_tokens: int) -> PromptUse:
        """The usage to report to the client of a request with these counts.

        Args:
            request: The request, of which nothing was reported yet.
            use: The counts of its own legs.
            block_size_tokens: Of the engine that runs it.
        """
        if request.fan_out_id is None:
            return use
        first = self._first_use.setdefault(request.fan_out_id, use)
        if first is use:
            return use
        # As in an engine, the last token is always computed, and with it the rest of its block.
        max_tokens = max(0, len(request.prompt_token_ids) - 1)
        max_tokens -= max_tokens % block_size_tokens
        stored_tokens = first.cached_tokens + first.cache_use.created_tokens
        hit_tokens = min(stored_tokens, max_tokens)
        if hit_tokens <= use.cached_tokens:
            return use
        external_tokens, created_tokens = use.cache_use
        stored_tokens = use.cached_tokens + created_tokens if created_tokens else 0
        cache_use = CacheUse(external_tokens, max(0, stored_tokens - hit_tokens))
        return use._replace(cached_tokens=hit_tokens, cache_use=cache_use)

    def check_integrity(self, in_flight: Iterable[Request]) -> None:
        """Raise AssertionError when answers are counted that are not in flight, or are not."""
        counted = Counter(
            request.fan_out_id for request in in_flight if request.fan_out_id is not None
        )
        assert counted == self._in_flight_counts, (
            f"answers: counted {self._in_flight_counts}, expected {counted}"
        )
        assert self._first_use.keys() <= counted.keys(), "prompts whose answers have ended"
