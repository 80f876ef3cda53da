"""What leases must do between any two engines behind `baton.runtime.ports.Engine`.

Subclass `LeaseContract`, name the subclass `Test...`, and give it `lease_pair`: engines with a
prefix cache of few blocks, a source whose leases last a second, and a decode engine that runs one
leg at a time. Override `make_leg` where the engine needs a payload.
"""

from __future__ import annotations

from baton.domain.handoff import LegKind
from tests.contracts.engine_contract import EngineListener, EngineTests, RunningPair


class LeaseContract(EngineTests):
    """The tests."""

    async def test_blocks_that_are_read_after_their_lease_are_not_used(
        self, lease_pair: RunningPair
    ) -> None:
        prefill, decode = lease_pair.prefill, lease_pair.decode
        before = decode.engine.load().transfers
        prompt = self.new_prompt(3 * prefill.facts.block_size_tokens + 5)
        ticket = await self.run_prefill(lease_pair, prompt)
        await self.wait_expired(prefill, 1)
        await self.overwrite_cache(prefill)
        leg = self.make_leg(LegKind.DECODE, prompt, max_tokens=12, ticket=ticket)
        tokens = await decode.run(leg)
        assert tokens == await self.run_locally(prefill, prompt, max_tokens=12)
        await self.wait_load(decode, lambda: decode.engine.load().transfers.invalidated_pulls > 0)
        after = decode.engine.load().transfers
        assert after.invalidated_pulls == before.invalidated_pulls + 1
        assert after.failures == before.failures  # the link did what it was asked for

    async def test_the_blocks_of_a_leg_that_waits_for_a_place_are_kept(
        self, lease_pair: RunningPair
    ) -> None:
        prefill, decode = lease_pair.prefill, lease_pair.decode
        before = decode.engine.load().transfers
        running = self.make_leg(
            LegKind.LOCAL, self.new_prompt(9), max_tokens=decode.facts.max_len_tokens - 20
        )
        assert await decode.engine.submit(running) is None
        await decode.wait_started(running.leg_id)
        prompt = self.new_prompt(3 * prefill.facts.block_size_tokens + 5)
        leg = self.make_leg(
            LegKind.DECODE,
            prompt,
            max_tokens=12,
            ticket=await self.run_prefill(lease_pair, prompt),
        )
        assert await decode.engine.submit(leg) is None
        # Two that nobody fetches, one after the other, end while the leg waits.
        for _ in range(2):
            await self.run_prefill(lease_pair, self.new_prompt(40))
            await self.wait_expired(prefill, 1)
        await self.overwrite_cache(prefill)
        assert not decode.outputs(leg.leg_id), "it did not have to wait"
        await decode.engine.abort([running.leg_id])
        await decode.wait_finished(leg.leg_id)
        wanted = await self.run_locally(prefill, prompt, max_tokens=12)
        assert decode.tokens(leg.leg_id) == wanted
        await self.wait_load(
            decode, lambda: decode.engine.load().transfers.pulls == before.pulls + 1
        )
        assert decode.engine.load().transfers.invalidated_pulls == before.invalidated_pulls

    # ------------------------------------------------------------------ steps of the tests
    async def run_locally(
        self, listener: EngineListener, prompt: tuple[int, ...], *, max_tokens: int
    ) -> tuple[int, ...]:
        """The tokens of a prompt that one engine computes and decodes."""
        return await listener.run(self.make_leg(LegKind.LOCAL, prompt, max_tokens=max_tokens))

    async def wait_expired(self, source: EngineListener, leases: int) -> None:
        """Wait until so many more of a source's leases have ended by themselves."""
        expected = source.engine.load().transfers.expired_leases + leases
        await self.wait_load(
            source, lambda: source.engine.load().transfers.expired_leases >= expected
        )

    async def overwrite_cache(self, source: EngineListener) -> None:
        """Have every block that a source does not keep hold another prompt."""
        facts = source.facts
        tokens = facts.block_size_tokens * (facts.kv_blocks // 4)
        for _ in range(5):
            await source.run(
                self.make_leg(LegKind.LOCAL, self.new_prompt(tokens - 8), max_tokens=1)
            )
