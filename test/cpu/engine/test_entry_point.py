"""The engine finds the plugin by its entry point, and by nothing else."""

from importlib.metadata import entry_points

from sglang_dsv4.plugin import install


def test_the_entry_point_is_the_plugin():
    found = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "sglang_dsv4"]
    assert len(found) == 1, "not installed: pip install --no-deps -e ."
    assert found[0].load() is install
