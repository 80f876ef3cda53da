"""Every route of the reference is there, under the method that the reference says."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import httpx
import pytest

from baton.engine.tiny_model import write_tiny_model
from baton.engine.vllm.frontend.settings import FrontendSettings
from baton.engine.vllm.gate.gate import ROUTES
from tests.compat.echo_fleet import EchoFleet
from tests.compat.endpoint import MODEL, serve
from tests.reference.api import GETS

pytestmark = [pytest.mark.real, pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    settings = FrontendSettings(model=str(model), served_model_name=MODEL, log_stats=True)
    with serve(settings, EchoFleet()) as running, httpx.Client(base_url=running.base_url) as client:
        yield client


@pytest.mark.parametrize("path", [path for paths in ROUTES.values() for path in paths])
def test_a_route_is_there_under_its_method_alone(client: httpx.Client, path: str) -> None:
    right, wrong = ("GET", "POST") if path in GETS else ("POST", "GET")

    assert client.request(right, path, json={}).status_code not in {404, 405}
    assert client.request(wrong, path).status_code == 405
