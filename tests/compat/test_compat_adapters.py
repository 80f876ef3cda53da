"""LoRA adapters as clients meet them: models of their own names."""

from __future__ import annotations

import anthropic
import openai
import pytest

from tests.compat.echo_fleet import EchoFleet
from tests.compat.endpoint import ADAPTER, Server

# vLLM warns of its own deprecated fields in the server's thread.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.usefixtures("stand_in_only")
def test_an_adapter_is_asked_for_by_its_name_in_place_of_the_model(
    client: openai.OpenAI, server: Server, fleet: EchoFleet
) -> None:
    for name, adapter in ((ADAPTER, ADAPTER), (server.model, None)):
        answer = client.completions.create(model=name, prompt="hi", max_tokens=2)
        assert answer.model == name
        assert fleet.arrived.get(timeout=5).adapter == adapter


@pytest.mark.usefixtures("stand_in_only")
def test_an_adapter_is_served_on_every_api(
    claude: anthropic.Anthropic, client: openai.OpenAI, fleet: EchoFleet
) -> None:
    claude.messages.create(
        model=ADAPTER, max_tokens=2, messages=[{"role": "user", "content": "hi"}]
    )
    client.responses.create(model=ADAPTER, input="hi", max_output_tokens=2)
    client.chat.completions.create(
        model=ADAPTER, max_tokens=2, messages=[{"role": "user", "content": "hi"}]
    )
    assert [fleet.arrived.get(timeout=5).adapter for _ in range(3)] == [ADAPTER] * 3


def test_an_adapter_that_is_not_configured_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny-eve"):
        client.completions.create(model="tiny-eve", prompt="hi", max_tokens=2)
