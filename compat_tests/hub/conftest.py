"""The variants of compat_tests/models serve here too."""

from compat_tests.models.conftest import built  # noqa: F401
