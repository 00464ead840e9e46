"""The settings table: defaults, parsing, and refusal by name."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest

from sglang_dsv4.errors import SettingError
from sglang_dsv4.settings import TABLE, Settings, read_settings


def test_an_empty_environment_gives_the_defaults():
    expected = {
        "enabled": True,
        "host_gb": None,
        "host_copies": None,
        "transfer": "auto",
        "verify": False,
        "prep": "auto",
    }
    assert asdict(read_settings({})) == asdict(Settings()) == expected


def test_the_table_and_the_dataclass_name_the_same_settings():
    assert list(TABLE) == [field.name for field in fields(Settings)]
    assert {s.variable for s in TABLE.values()} == {
        "DSV4_ENABLED", "DSV4_HOST_GB", "DSV4_HOST_COPIES", "DSV4_TRANSFER", "DSV4_VERIFY", "DSV4_PREP",
    }  # fmt: skip
    assert all(setting.meaning for setting in TABLE.values())


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("DSV4_ENABLED", "0", "enabled", False),
        ("DSV4_ENABLED", "1", "enabled", True),
        ("DSV4_HOST_GB", "auto", "host_gb", None),
        ("DSV4_HOST_GB", "12", "host_gb", 12.0),
        ("DSV4_HOST_GB", "0.25", "host_gb", 0.25),
        ("DSV4_HOST_GB", "1048575", "host_gb", 1_048_575.0),
        ("DSV4_HOST_COPIES", "auto", "host_copies", None),
        ("DSV4_HOST_COPIES", "1", "host_copies", 1),
        ("DSV4_HOST_COPIES", "4096", "host_copies", 4096),
        ("DSV4_TRANSFER", "triton", "transfer", "triton"),
        ("DSV4_TRANSFER", "torch", "transfer", "torch"),
        ("DSV4_TRANSFER", "auto", "transfer", "auto"),
        ("DSV4_VERIFY", "1", "verify", True),
        ("DSV4_VERIFY", "0", "verify", False),
        ("DSV4_PREP", "stream", "prep", "stream"),
        ("DSV4_PREP", "engine", "prep", "engine"),
    ],
)
def test_good_values(variable, text, name, value):
    found = read_settings({variable: text, "PATH": "/bin", "SGLANG_DSV4_X": "y"})
    assert asdict(found) == {**asdict(Settings()), name: value}
    assert type(getattr(found, name)) is type(value)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        *(("DSV4_ENABLED", text) for text in ("", "2", "yes", "true", "-1", " 1")),
        *(("DSV4_VERIFY", text) for text in ("", "2", "on", "False")),
        *(
            ("DSV4_HOST_GB", t)
            for t in ("", "0", "-1", "-0.5", "nan", "inf", "-inf", "1e300", "1048576", "12GB", "Auto")
        ),
        *(("DSV4_HOST_COPIES", text) for text in ("", "0", "-3", "1.5", "many", "AUTO", "1e3", "nan")),
        *(("DSV4_TRANSFER", text) for text in ("", "cuda", "Triton", "triton,torch", "0")),
        *(("DSV4_PREP", text) for text in ("", "Stream", "1", "stream,auto")),
    ],
)
def test_bad_values_are_refused_by_name(variable, text):
    with pytest.raises(SettingError) as caught:
        read_settings({variable: text})
    assert str(caught.value).startswith(f"{variable}={text!r}: ")


@pytest.mark.parametrize("variable", ["DSV4_HOST_GIB", "DSV4_", "DSV4_VERIFY_", "DSV4_host_gb"])
def test_an_unknown_variable_is_refused_with_the_known_ones(variable):
    with pytest.raises(SettingError) as caught:
        read_settings({variable: "1", "DSV4_VERIFY": "1"})
    assert f"unknown setting {variable};" in str(caught.value)
    for known in ("DSV4_ENABLED", "DSV4_HOST_GB", "DSV4_HOST_COPIES", "DSV4_TRANSFER", "DSV4_VERIFY"):
        assert known in str(caught.value)


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("DSV4_HOST_COPIES", "7")
    assert read_settings().host_copies == 7
    monkeypatch.setenv("DSV4_HOST_COPIES", "zero")
    with pytest.raises(SettingError, match="DSV4_HOST_COPIES='zero'"):
        read_settings()
