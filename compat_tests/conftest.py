"""What every test shares: the CPU, one thread a library, no network; tiny checkpoints built once."""

from __future__ import annotations

import os
import tempfile

# Before jax, torch or the hub's client are imported: each reads its settings once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # bitsandbytes would compile for longer than it computes
# Tests that compile the same program share it: XLA takes seconds, a tiny run one. Gone with the session.
_compiled = tempfile.TemporaryDirectory(prefix="trl-jax-compiled-")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compiled.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# Nor does LLVM polish what runs for a moment: a quarter of the tests' time. XLA_FLAGS= runs them as users run.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import pytest  # noqa: E402

from compat_tests import tiny  # noqa: E402


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(model_type="llama", **facts) -> the folder of `tiny.tiny_model`; shared, so read only."""
    folders = {}

    def build(model_type: str = "llama", **facts):
        key = repr((model_type, sorted(facts.items())))
        if key not in folders:
            folder = tmp_path_factory.mktemp(model_type)
            folders[key] = tiny.tiny_model(folder, model_type, **facts)
        return folders[key]

    return build


# Files whose tests share runs that one of them trains: each goes to one worker, as a whole and first of all.
SHARING = (
    "parity/test_curve.py", "parity/test_encoder_curves.py", "parity/test_evaluate.py", "exported/test_training.py",
    "trainer/test_trainer_train.py", "trainer/test_trainer_evaluate.py", "trainer/test_trainer_save.py",
    "trainer/test_resume.py", "faults/test_going_on.py", "models/test_encoder_facts.py",
    "compat_tests/test_scripts.py", "adapters/test_against_peft.py",
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Shared(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(SHARING) else nodeid

    return Shared(config, log)
