"""Settings for all tests (CPU, one thread per library, offline) and the session's tiny checkpoints."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

# Dozens of processes import the package: compile it once, even where the environment turns byte code off.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Set before jax, torch and huggingface_hub are imported: each reads its settings once, on import.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "localhost,127.0.0.1"  # for the tests' own Hub servers and ranks
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # compiling would take bitsandbytes longer than computing
# Tests share compiled programs: XLA takes seconds for each, a tiny run one second. Deleted at the end of the session.
_compiled = tempfile.TemporaryDirectory(prefix="trl-jax-compiled-")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compiled.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# A datasets cache per session, so that no run finds what another session has cached.
_kept = tempfile.TemporaryDirectory(prefix="trl-jax-datasets-")
os.environ.setdefault("HF_DATASETS_CACHE", _kept.name)
# Short runs are not worth LLVM's optimizations. XLA's older fusion emitters (removed in jaxlib 0.12) compile in a fifth
# of the time, and not splitting programs for parallel code generation saves another fifth. With an empty XLA_FLAGS the
# tests compile as users do.
_quickly = "--xla_backend_optimization_level=0"
if version("jaxlib").startswith("0.10."):
    _quickly += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ.setdefault("XLA_FLAGS", _quickly)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from compat_tests import shared_programs, tiny  # noqa: E402
from compat_tests.effort import drawn, leave_to_thorough  # noqa: E402

hypothesis.settings.register_profile("trl_jax", max_examples=drawn(100))
hypothesis.settings.load_profile("trl_jax")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(model_type="llama", **facts) -> the folder of `tiny.tiny_model`, built once per session: do not write
    to it."""
    folders = {}

    def build(model_type: str = "llama", **facts):
        key = repr((model_type, sorted(facts.items())))
        if key not in folders:
            folder = tmp_path_factory.mktemp(model_type)
            folders[key] = tiny.tiny_model(folder, model_type, **facts)
        return folders[key]

    return build


# The most expensive files, in order of cost, run first: a worker that began one last would keep all others waiting.
FIRST = (
    "rollout/test_server.py", "mesh/test_eight_devices.py", "generation/test_reuse.py",
    "compat_tests/test_notebooks.py", "trainer/test_own_policy_loss.py", "trainer/test_image_rows.py",
    "trainer/test_grpo_tools.py", "models/test_families.py", "training/test_rollout_resume.py",
    "trainer/test_image_adapters.py", "trainer/test_own_preference_loss.py", "trainer/test_policies_of_scripts.py",
    "hub/vision/test_families.py", "trainer/test_image_rollouts.py", "mesh/test_faults.py",
    "compat_tests/test_scripts.py", "trainer/test_own_steps.py", "cli/test_main_module.py",
    "mesh/test_two_processes.py", "trainer/test_image_scripts.py", "tasks/test_public_tasks.py",
    "mesh/test_two_with_server.py", "trainer/test_async_grpo_trainer.py", "compat_tests/test_public_names.py",
    "trainer/test_attributes_set.py", "trainer/test_sft_trainer.py", "faults/test_hub.py", "faults/test_hub_waits.py",
    "hub/peft/test_virtual_tokens.py", "training/test_optimizer_choice.py", "mesh/test_one_raises.py",
    "trainer/test_tool_images.py", "trainer/test_dpo_trainer.py", "training/test_features.py",
    "parity/test_image_curve.py", "plan/test_rollout_plans.py", "mesh/test_two_language_models.py",
    "training/test_resume.py", "cli/test_transformers_patches.py", "parity/test_grpo_curve.py",
    "hub/test_pretrained.py", "training/test_torch_updates.py", "generation/test_generate.py", "parity/test_curve.py",
    "mesh/test_written_together.py", "rollout/test_sampling_logps.py", "trainer/test_grpo_trainer.py",
    "training/test_resume_beside_trl.py", "hub/peft/test_causal_adapters.py", "parity/test_dpo_curve.py",
    "parity/test_reference_free_curve.py", "cli/test_launchers.py", "compat_tests/test_readability.py",
    "training/test_user_loss.py", "trainer/test_trainer_train.py", "trainer/test_distillation_trainer.py",
    "parity/test_sft_curve.py", "faults/test_signals.py", "hub/peft/test_training.py", "trainer/test_edited_configs.py",
    "trainer/test_ported.py", "generation/test_families.py", "trainer/test_own_preference_loss_images.py",
    "nn/test_image_attention.py", "cli/test_stand_ins.py", "training/test_policies_of_trl_resumed.py",
    "faults/test_foreign_code.py", "training/test_torch_loss.py", "generation/test_refilling.py",
    "hub/peft/test_resized.py", "models/test_multimodal_causal.py", "models/test_encoders.py",
    "faults/test_continuing.py", "generation/test_complete.py", "hub/vision/test_qwen.py", "config/test_arguments.py",
)  # fmt: skip


def pytest_configure(config):
    gc.disable()  # imported modules and collected tests live on, so scanning them again and again is wasted
    config.addinivalue_line("markers", "usual(*ids): the cases that run without THOROUGH=1, see effort.py")


def pytest_collection_modifyitems(config, items):
    def place(item):
        file = item.path.as_posix()
        return next((number for number, dear in enumerate(FIRST) if file.endswith(dear)), len(FIRST))

    items.sort(key=place)
    leave_to_thorough(items, whole=not any("::" in argument for argument in config.args))


def pytest_sessionstart(session):
    shared_programs.install()


def pytest_collection_finish():
    """Exempt modules and tests from garbage collection: torch, transformers and jax need not be scanned again. Collect
    less often, too: building programs allocates many small objects."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 20)
    # At the start and end of each of TRL's runs, accelerate collects garbage to free the memory of GPUs.
    if (memory := sys.modules.get("accelerate.utils.memory")) is not None:
        memory.gc = SimpleNamespace(collect=lambda: 0)


# Linux limits a process to 65,530 memory mappings. A compiled program needs several, and exceeding the limit is a
# segmentation fault.
MAPPINGS, _mappings, _ended = 45_000, Path("/proc/self/maps"), 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Clear JAX's caches before the process runs out of memory mappings; checked every twentieth test and after each
    file.

    After a file, and whenever caches were cleared, surviving objects (mostly traced programs) are frozen, because each
    collection would scan them all.
    """
    global _ended
    _ended += 1
    another = nextitem is None or nextitem.path != item.path
    if (another or _ended % 20 == 0) and _mappings.exists():
        if _mappings.read_bytes().count(b"\n") > MAPPINGS:
            gc.unfreeze()
            jax.clear_caches()
            gc.collect()
            gc.freeze()
    if another:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run all tests of a file on one worker, because they share runs, models and compiled programs."""
    from xdist.scheduler import LoadFileScheduling

    gc.enable()  # the controller does not collect tests, where it would be enabled again
    config.option.loadscopereorder = False  # True would start with the files that have the most tests
    return LoadFileScheduling(config, log)
