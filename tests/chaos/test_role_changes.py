from __future__ import annotations

from tests.chaos.cases.data_plane import role_changes
from tests.chaos.load import Load


async def test_role_changes_and_a_scale_down_under_load_cost_no_request_and_no_token() -> None:
    load = Load(rate_per_s=60, requests=240, output_tokens=(8, 48), shared_prompts=2)
    outcome = await role_changes(40, 1, load)
    assert [bound for bound in outcome.bounds if not bound.is_met] == [], outcome.note
