"""Each test is of the folder that says what it needs: a CPU, a GPU, or servers on a GPU."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
FOLDERS = {"cpu", "gpu", "server"}


def test_each_test_is_marked_by_its_folder(request):
    assert {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")} == FOLDERS
    for item in request.session.items:
        assert {mark.name for mark in item.iter_markers()} & FOLDERS == {item.path.relative_to(TESTS).parts[0]}, item
