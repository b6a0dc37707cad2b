"""Tier options: a wrong one stops the start and says what is right; what a newer vLLM adds is no option."""

import subprocess
import sys
from dataclasses import fields

import pytest

from kvservice.client.connectors.vllm_tier.options import TierOptions
from kvservice.model.errors import ConfigError

ADDRESS = "unix:/run/kvservice.sock"


def test_defaults_need_only_the_address() -> None:
    options = TierOptions.of({"address": ADDRESS})
    assert options.is_shared
    assert not options.keeps_on_reset
    assert options.tenant == "default"


def test_every_option_says_why() -> None:
    assert all(spec.metadata["why"] for spec in fields(TierOptions))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("weight", "r1", "did you mean 'weights'?"),
        ("keep_on_reset", True, "did you mean 'keeps_on_reset'?"),
        ("zzz", 1, "Known are address, token"),
        ("weights", 5, "must be a text"),
        ("is_shared", "false", "must be true or false"),
        ("load_threads", 0, "must be above 0"),
        ("stores_waiting_max", 2.5, "must be a whole number"),
        ("lookup_deadline_s", float("nan"), "must be above 0 and finite"),
        ("tenant", "", "tenant must not be empty"),
        ("address", "", "kvservice serve"),
        ("address", "/run/kvservice.sock", "neither"),
    ],
)
def test_what_is_wrong_is_named(name: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TierOptions.of({"address": ADDRESS, name: value})
    assert says in str(raised.value)
    assert str(raised.value).startswith("secondary_tiers, KVServiceTier: ")


def test_what_the_user_did_not_write_is_vllms() -> None:
    given = {"address": ADDRESS, "wieghts": "r1", "something_new": object()}
    assert TierOptions.of({**given, "load_deadline_s": 3}, {"address"}).load_deadline_s == 3.0
    with pytest.raises(ConfigError, match="did you mean 'weights'"):
        TierOptions.of(given, {"address", "wieghts"})


@pytest.mark.parametrize("module", ["options", "identity", "side"])
def test_importing_a_part_loads_no_kernels(module: str) -> None:
    """vLLM's CPU worker dies when numba was imported before it was built."""
    name = f"kvservice.client.connectors.vllm_tier.{module}"
    heavy = ("numba", "llvmlite", "torch", "vllm", "kvservice.kernels.cpu")
    script = f"import sys, {name}; print(*[name for name in sys.modules if name.split('.')[0] in {heavy!r}])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_package_knows_its_one_name() -> None:
    import kvservice.client.connectors.vllm_tier as package

    with pytest.raises(AttributeError, match="KVServiceTeir"):
        package.KVServiceTeir  # noqa: B018
