"""The settings are parsed, refused by name, or left alone where they are another program's."""

from __future__ import annotations

import logging
from dataclasses import asdict

import pytest

from sglang_dsv4 import settings
from sglang_dsv4.engine.hooks import install
from sglang_dsv4.errors import SettingError
from sglang_dsv4.settings import OFF, PLAIN_SERVERS, TABLE, Sessions, Settings, read_settings, unknown_names


def test_a_row_of_the_table_has_the_default_of_its_field():
    assert all(setting.meaning for setting in TABLE.values())
    assert TABLE["host_gb"].variable == "DSV4_HOST_GB"
    assert read_settings({}) == Settings()


@pytest.mark.parametrize(("name", "text", "value"), [
    ("enabled", "1", True), ("host_gb", "auto", None), ("host_gb", "12", 12.0), ("host_gb", "1048575", 1_048_575.0),
    ("transfer", "torch", "torch"), ("verify", "1", True), ("verify", "0", False), ("prep", "off", "off"),
    ("plain", "off", "off"), ("sessions", "auto", Sessions()), ("sessions", "off", OFF),
    ("sessions", "plain", PLAIN_SERVERS), ("sessions", "12.5", Sessions(most_gib=12.5)),
])  # fmt: skip
def test_good_values(name, text, value):
    found = read_settings({TABLE[name].variable: text, "PATH": "/bin", "SGLANG_DSV4_X": "y"})
    assert asdict(found) == {**asdict(Settings()), name: value}
    assert type(getattr(found, name)) is type(value)


@pytest.mark.parametrize(("variable", "texts"), [
    ("DSV4_ENABLED", ("", "2", "yes", "true", "-1", " 1")), ("DSV4_VERIFY", ("", "2", "on", "False")),
    ("DSV4_HOST_GB", ("", "0", "-1", "-0.5", "nan", "inf", "-inf", "1e300", "1048576", "12GB", "Auto")),
    ("DSV4_SESSIONS", ("", "0", "-1", "nan", "inf", "on", "Off", "8GB")),
    ("DSV4_TRANSFER", ("", "cuda", "staged", "Torch", "torch,auto", "0")),
    ("DSV4_PREP", ("", "Off", "1", "stream", "graph")),
])  # fmt: skip
def test_bad_values_are_refused_by_name(variable, texts):
    for text in texts:
        with pytest.raises(SettingError) as caught:
            read_settings({variable: text})
        assert str(caught.value).startswith(f"{variable}={text!r}: ")


@pytest.mark.parametrize(("given", "meant"), [
    ("DSV4_HOST_GIB", "DSV4_HOST_GB"), ("DSV4_HOSTGB", "DSV4_HOST_GB"), ("DSV4_HOST_GBS", "DSV4_HOST_GB"),
    ("DSV4_host_gb", "DSV4_HOST_GB"), ("DSV4_HOST_GB_PER_RANK", "DSV4_HOST_GB"), ("DSV4_HOST", "DSV4_HOST_GB"),
    ("DSV4_VERIFY_", "DSV4_VERIFY"), ("DSV4_VERIFIES", "DSV4_VERIFY"), ("DSV4_ENABLE", "DSV4_ENABLED"),
    ("DSV4_TRANFSER", "DSV4_TRANSFER"),
])  # fmt: skip
def test_a_misspelt_name_is_refused_with_the_one_that_was_meant(given, meant):
    with pytest.raises(SettingError, match=f"unknown setting {given}: did you mean {meant}"):
        read_settings({given: "1", "DSV4_VERIFY": "1"})


@pytest.mark.parametrize("name", ["DSV4_DEPLOYMENT", "DSV4_MODEL_PATH", "DSV4_", "DSV4_NAMESPACE", "DSV4_HOST_COPIES"])
def test_a_name_of_somebody_else_or_of_before_is_warned_of_once_and_left_alone(caplog, name):
    settings._warn_unknown.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert read_settings({name: "x", "DSV4_VERIFY": "1"}) == Settings(verify=True)
        read_settings({name: "x"})
    assert [record.getMessage().split(" ")[0] for record in caplog.records] == [name]


def service_links(prefix):
    """What the kubelet sets for a Service of one or two ports."""
    address = "10.0.0.1"
    return {
        f"{prefix}_SERVICE_HOST": address, f"{prefix}_SERVICE_PORT": "80", f"{prefix}_SERVICE_PORT_HTTP": "80",
        f"{prefix}_PORT": f"tcp://{address}:80", f"{prefix}_PORT_80_TCP": f"tcp://{address}:80",
        f"{prefix}_PORT_80_TCP_PROTO": "tcp", f"{prefix}_PORT_80_TCP_PORT": "80",
        f"{prefix}_PORT_80_TCP_ADDR": address, f"{prefix}_PORT_53_UDP": f"udp://{address}:53",
        f"{prefix}_PORT_53_UDP_ADDR": address,
    }  # fmt: skip


@pytest.mark.parametrize("service", ["DSV4_DECODE", "DSV4", "DSV4_HOST", "DSV4_PREP", "DSV4_V4_FLASH"])
def test_the_variables_of_a_kubernetes_service_are_passed_over(caplog, service):
    with caplog.at_level(logging.DEBUG):
        assert read_settings({**service_links(service), "DSV4_HOST_GB": "3"}) == Settings(host_gb=3)
    assert not unknown_names(service_links(service))
    assert not caplog.records


@pytest.mark.parametrize("other", [{"DSV4_HOST_GB": "64GB"}, {"DSV4_HOSTGB": "64"}, {"DSV4_PREP": ""}])
def test_switched_off_nothing_else_is_looked_at(other):
    assert read_settings({"DSV4_ENABLED": "0", **other}) == Settings(enabled=False)


def test_the_process_environment_is_the_default_and_switched_off_no_hook_hears_of_it(monkeypatch):
    monkeypatch.setenv("DSV4_HOST_GB", "7")
    assert read_settings().host_gb == 7
    for name, text in {"DSV4_ENABLED": "0", "DSV4_HOST_GB": "64GB", "DSV4_HOSTGB": "1"}.items():
        monkeypatch.setenv(name, text)
    installation = install._install()
    assert (installation.enabled, installation.failure) == (False, None)
