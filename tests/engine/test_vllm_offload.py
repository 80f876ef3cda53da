"""The tier in the host's memory, as vLLM is told of it."""

from __future__ import annotations

from dataclasses import replace

from baton.domain.fleet import Role
from baton.engine.vllm.core.settings import (
    NixlSettings,
    OnLoadFailure,
    VllmEngineSettings,
    engine_arguments,
)

SETTINGS = VllmEngineSettings(
    replica_id="r", pool="p", model_source="m", model_name="m", role=Role.DECODE
)
NIXL = NixlSettings(host="127.0.0.1", port=1, lease_s=7, on_load_failure=OnLoadFailure.FAIL)


def transfer(settings: VllmEngineSettings) -> dict[str, object]:
    told = engine_arguments(settings, None)["kv_transfer_config"]
    assert isinstance(told, dict)
    return told


def test_an_engine_with_both_is_told_of_both_and_pulls_before_it_loads() -> None:
    alone = transfer(replace(SETTINGS, nixl=NIXL))
    both = transfer(replace(SETTINGS, nixl=NIXL, host_memory_bytes=1 << 30))
    assert both["kv_connector"] == "MultiConnector"
    assert both["kv_role"] == alone["kv_role"] == "kv_consumer"
    assert both["kv_load_failure_policy"] == "fail"
    assert both["kv_connector_extra_config"] == {
        "connectors": [
            alone,
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "cpu_bytes_to_use": 1 << 30,
                    "self_describing_kv_events": True,
                },
            },
        ]
    }


def test_an_engine_that_hands_nothing_over_may_still_offload() -> None:
    assert transfer(replace(SETTINGS, host_memory_bytes=5))["kv_connector"] == "OffloadingConnector"


def test_vllm_reads_these_settings_as_they_are_meant() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    both = KVTransferConfig(**transfer(replace(SETTINGS, nixl=NIXL, host_memory_bytes=1 << 30)))
    assert KVConnectorFactory.get_connector_class(both) is MultiConnector
    children = both.kv_connector_extra_config["connectors"]
    configs = [KVTransferConfig(**child, engine_id=both.engine_id) for child in children]
    assert [KVConnectorFactory.get_connector_class(config).__name__ for config in configs] == [
        "NixlConnector",
        "OffloadingConnector",
    ]
