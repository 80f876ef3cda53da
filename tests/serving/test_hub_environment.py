"""What processes on any node are told of hubs and proxies."""

from __future__ import annotations

from baton.serving.replica import hub_environment
from baton.serving.replica.hub_environment import apply_variables, select_variables


def test_only_what_is_about_hubs_and_proxies_is_kept() -> None:
    shell = {"HF_TOKEN": "t", "https_proxy": "http://p:1", "HOME": "/h", "NO_PROXY": "", "X": "1"}
    assert select_variables(shell) == {"HF_TOKEN": "t", "https_proxy": "http://p:1"}
    wanted = {"HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTPS_PROXY", "HTTP_PROXY"}
    assert wanted <= set(hub_environment.HUB_VARIABLES)
    assert "HF_HOME" not in hub_environment.HUB_VARIABLES, "a folder of the shell's own machine"


def test_the_shell_counts_for_more_than_the_node_and_says_nothing_of_the_rest() -> None:
    seen = {"HF_ENDPOINT": "https://of-the-node", "HF_HOME": "/node"}
    apply_variables(seen, {"HF_ENDPOINT": "https://of-the-shell"}, ("10.0.0.1",))
    assert seen == {"HF_ENDPOINT": "https://of-the-shell", "HF_HOME": "/node"}


def test_nodes_are_reached_without_the_proxy() -> None:
    seen = {"no_proxy": "mirror.example"}
    apply_variables(
        seen, {"HTTPS_PROXY": "http://p:1", "NO_PROXY": ".corp, 10.0.0.2"}, ("10.0.0.1", "fd::2")
    )
    wanted = ".corp,10.0.0.2,mirror.example,localhost,127.0.0.1,::1,10.0.0.1,fd::2"
    assert seen["NO_PROXY"] == seen["no_proxy"] == wanted


def test_a_proxy_of_the_node_alone_is_for_others_too() -> None:
    seen = {"http_proxy": "http://p:1"}
    apply_variables(seen, {}, ("10.0.0.1",))
    assert "10.0.0.1" in seen["no_proxy"].split(",")
