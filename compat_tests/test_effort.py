"""Cases that `usual` does not name run only under THOROUGH=1, and an id that matches no case is an error."""

from __future__ import annotations

import pytest

from compat_tests import effort

TESTS = """
import pytest
from compat_tests.effort import usual

@usual("a", "c")
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_some(name):
    pass

def test_other():
    pass
"""


@pytest.fixture
def items(request, tmp_path):
    """items(source) -> what pytest collects from it."""

    def collected(source: str) -> list[pytest.Item]:
        path = tmp_path / f"collected_by_{request.node.name}.py"  # a module name can be imported only once
        path.write_text(source)
        return list(request.session.genitems(pytest.Module.from_parent(request.session, path=path)))

    return collected


def skipped(items: list[pytest.Item]) -> list[str]:
    return [item.name for item in items if any(mark.name == "skipif" for mark in item.iter_markers())]


def test_cases_that_are_not_named_wait(items):
    found = items(TESTS)
    effort.leave_to_thorough(found, whole=True)
    assert skipped(found) == ["test_some[b]"]


def test_a_name_of_no_case_is_an_error(items):
    found = items(TESTS.replace('"a", "c', '"a", "z", "c'))
    with pytest.raises(pytest.UsageError, match=r"test_some: has no case \['z'\], which `usual` names"):
        effort.leave_to_thorough(found, whole=True)
    effort.leave_to_thorough(found, whole=False)
    assert skipped(found) == ["test_some[b]"]
