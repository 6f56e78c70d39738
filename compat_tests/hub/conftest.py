"""The fixtures for variants in compat_tests/models are used here, too."""

from compat_tests.models.conftest import built  # noqa: F401
