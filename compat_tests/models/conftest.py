"""Each variant is built once per session."""

from __future__ import annotations

import pytest

from compat_tests.models import variants


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """built(family, name) -> the folder of that variant; shared, so do not write to it."""
    folders = {}

    def build(family: str, name: str):
        if (family, name) not in folders:
            folder = tmp_path_factory.mktemp(f"{family}-{name}")
            folders[family, name] = variants.build(folder, family, name)
        return folders[family, name]

    return build
