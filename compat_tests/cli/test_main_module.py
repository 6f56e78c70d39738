"""`python -m trl_jax`: trl's trainer names are ours in the process and its children; other names are the installed
trl's."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from compat_tests.effort import only_thorough
from compat_tests.tiny import tiny_tokenizer
from trl_jax.cli.trl_alias import ADJUSTMENTS, FrontModule
from trl_jax.hub.peft_config import LoraConfig

ROOT = str(Path(__file__).parents[2])


def run(tmp_path, code, *args, without=(), how=()):
    """Run a script with `python -m trl_jax`; modules in `without` cannot be imported."""
    hidden = tmp_path / "hidden"
    hidden.mkdir(exist_ok=True)
    for name in without:  # a module that raises ModuleNotFoundError shadows the installed one
        (hidden / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name={name!r})")
    script = tmp_path / "script.py"
    script.write_text(code)
    env = {**os.environ, "PYTHONPATH": ROOT}
    command = [sys.executable, "-m", "trl_jax", *(how or [str(script)]), *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)


NAMES = """
import sys
from transformers import AutoTokenizer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer
assert SFTTrainer.__module__.startswith("trl_jax")
assert not {"peft", "transformers.modeling_utils"} & sys.modules.keys(), "a script that imports transformers first"
import trl
from trl import RewardConfig, RewardTrainer, ScriptArguments, TrlParser, ModelConfig, get_peft_config
from trl.trainer.reward_trainer import RewardTrainer as A, DataCollatorForPreference
from trl.trainer import RewardConfig as B
from trl.scripts.utils import DatasetConfig
from trl.data_utils import extract_prompt
from trl.extras.dataset_formatting import conversations_formatting_function
from trl.rewards import think_format_reward
import trl.trainer.utils
from trl.trainer.utils import get_quantization_config
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer
from trl import RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
kinds = (RewardConfig, RewardTrainer, ScriptArguments, TrlParser, ModelConfig, get_peft_config, A, B, DatasetConfig,
         DataCollatorForPreference, extract_prompt, think_format_reward, get_quantization_config,
         conversations_formatting_function, DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer,
         RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer)
assert all(kind.__module__.startswith("trl_jax.") for kind in kinds), kinds
assert A is RewardTrainer is trl.RewardTrainer and B is RewardConfig
print(sys.argv[1:], __name__, trl.__version__)
"""


def test_the_names_of_all_trainers_are_ours(tmp_path):
    """A script that imports transformers first stays fast: neither its models nor PEFT are imported."""
    done = run(tmp_path, NAMES, "--lr", "1")
    assert done.stdout == "['--lr', '1'] __main__ 1.16.0\n", done.stderr


ENVIRONMENT = """
import os
os.environ |= {"HF_HOME": "/home-of-hf", "HF_ENDPOINT": "https://mirror.example", "HF_HUB_OFFLINE": "1",
               "HF_DATASETS_CACHE": "/rows", "TRANSFORMERS_VERBOSITY": "error", "JAX_PLATFORMS": "cpu"}
import datasets, huggingface_hub.constants as hub, transformers
from trl import SFTConfig
import jax
print(hub.HF_HOME, hub.ENDPOINT, hub.HF_HUB_OFFLINE, datasets.config.HF_DATASETS_CACHE,
      transformers.logging.get_verbosity(), jax.config.jax_platforms)
"""


def test_a_script_sets_variables_that_libraries_read_on_import(tmp_path, monkeypatch):
    """Nothing imports these libraries before the script does. Without trl_jax, Python prints the same."""
    for name in ("HF_HUB_OFFLINE", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    done = run(tmp_path, ENVIRONMENT)
    assert done.stdout == "/home-of-hf https://mirror.example True /rows 40 cpu\n", done.stderr


THEIRS = """
import trl, trl.trainer.base_trainer
from trl import WeaveCallback, add_response_schema
assert add_response_schema.__module__ == "trl.chat_template_utils"  # the installed one
from trl.trainer.utils import pad
from trl.experimental.utils import pad_to_length
import trl.import_utils as own, trl.generation as another
own.is_vllm_available = another.nothing = lambda: False
from trl.trainer.utils import SIMPLE_CHAT_TEMPLATE
from trl.commands.cli_utils import TrlParser
assert WeaveCallback.__module__ == "trl.trainer.callbacks" and pad.__module__ == "trl.trainer.utils"
print(trl.trainer.base_trainer._BaseTrainer.__module__ == "trl.trainer.base_trainer")
"""


@only_thorough
def test_other_names_are_the_installed_trls(tmp_path):
    pytest.importorskip("trl")
    done = run(tmp_path, THEIRS)
    assert done.stdout == "True\n", done.stderr


OWN = """
import trl
try:
    from trl import GKDTrainer
except ImportError:
    from trl.experimental.gkd import GKDTrainer
from trl import SFTTrainer
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.gkd import gkd_trainer
from trl.experimental.gold import GOLDTrainer, gold_trainer
from trl.experimental.kto import KTOTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer
from trl.experimental.gkd.gkd_trainer import unwrap_model_for_generation
assert gkd_trainer.GKDTrainer is GKDTrainer and gold_trainer.GOLDTrainer is GOLDTrainer
from importlib.resources import files
assert "model" in files("trl").joinpath("templates/lm_model_card.md").read_text()  # checkpoints have a model card
print(GKDTrainer.__module__, GOLDTrainer.__mro__[1].__module__, SFTTrainer.__module__, KTOTrainer.__module__)
print(AsyncGRPOTrainer.__module__)
assert OnlineDPOTrainer.__module__ == "trl_jax.trainer.online_dpo_trainer"
"""


def test_experimental_trainers_are_ours_or_the_installed_trls(tmp_path):
    pytest.importorskip("trl")
    done = run(tmp_path, OWN)
    ours = [f"trl_jax.trainer.{name}_trainer" for name in ("gkd", "sft", "kto", "async_grpo")]
    assert done.stdout.split() == [ours[0], "trl.trainer.sft_trainer", *ours[1:]], done.stderr
    assert done.stderr.count("trl.experimental.gold is the installed trl's: its trainers train with torch.") == 1
    assert "trl.experimental.gkd is" not in done.stderr


MISSING = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *a: None if name.split(".")[0] == "trl" else find(name, *a))
import trl
print(trl.__version__, trl.RewardConfig.__module__)
others = "from trl import RewardTrainr", "import trl.trainer.base_trainer", "from trl.trainer.utils import padd"
for line in ("from trl import GKDTrainer", *others):
    try:
        exec(line)
    except (ImportError, NotImplementedError) as error:
        print(type(error).__name__, str(error)[:80])
"""


@only_thorough
def test_where_trl_is_not_installed_a_missing_name_says_so(tmp_path):
    done = run(tmp_path, MISSING)
    assert done.stdout.splitlines() == [
        "1.16.0 trl_jax.trainer.reward_config",
        "ImportError GKDTrainer is in trl_jax.experimental.gkd, because TRL only has it in trl.experi",
        "ImportError trl has no RewardTrainr in trl_jax, and trl is not installed. Closest: RewardTra",
        "ModuleNotFoundError trl.trainer.base_trainer is not part of trl_jax, and trl is not installed. trl_j",
        "ImportError trl.trainer.utils has no padd in trl_jax, and trl is not installed. Closest: pad",
    ], done.stderr


OLD = """
import warnings
from transformers import TrainingArguments
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    args = TrainingArguments("out", evaluation_strategy="steps", warmup_ratio=0.1, no_cuda=True)
print(args.eval_strategy.value, args.warmup_steps, args.use_cpu, len([w for w in told if "old name" in str(w.message)]))
try:
    TrainingArguments("out", evalstrategy="steps")
except TypeError as error:
    print(str(error).partition(". Did you mean")[0])  # which Python 3.13 asks
"""


@only_thorough
def test_transformers_own_arguments_take_old_names_there(tmp_path):
    done = run(tmp_path, OLD)
    assert done.stdout.splitlines() == [
        "steps 0.1 True 3",
        "TrainingArguments.__init__() got an unexpected keyword argument 'evalstrategy'",
    ], done.stderr


DOUBLES = """
from dataclasses import dataclass
from transformers import HfArgumentParser
from trl import RLOOConfig

@dataclass
class Script:
    reward_model_path: str = "unset"

words = ["--output_dir", "out", "--reward_model_path", "judge"]
script, config = HfArgumentParser((Script, RLOOConfig)).parse_args_into_dataclasses(words)
print(script.reward_model_path, config.reward_model_path, isinstance(config, RLOOConfig))
print(HfArgumentParser(RLOOConfig).parse_args_into_dataclasses(words)[0].reward_model_path)
"""


@only_thorough
def test_a_scripts_own_argument_may_have_the_name_of_one_that_trl_lacks(tmp_path):
    done = run(tmp_path, DOUBLES)
    assert done.stdout.splitlines() == ["judge None True", "judge"], done.stderr


TEMPLATES = """
from compat_tests.tiny import tiny_tokenizer
from trl_jax.cli.main import adding_hints

chat = [{"role": "user", "content": "bread"}]
tokenizer = tiny_tokenizer(chat_template=True)
for options in {"return_dict": True}, {"tokenize": False}:
    result = tokenizer.apply_chat_template(chat, **options)
    try:
        with adding_hints():
            result["nothing"]
    except (LookupError, TypeError) as error:
        assert not hasattr(error, "__notes__"), error.__notes__
tokenizer.apply_chat_template(chat)["nothing"]
"""


@only_thorough
def test_an_error_has_a_note_where_a_chat_template_gives_another_result_than_it_did(tmp_path):
    """The script first makes two calls whose results have never changed: their errors get no note."""
    done = run(tmp_path, TEMPLATES)
    assert done.returncode == 1 and "return_dict=False gives the token ids alone" in done.stderr, done.stderr
    assert "AssertionError" not in done.stderr, done.stderr


CHILDREN = """
import multiprocessing, subprocess, sys

def where(_):
    import trl
    return trl.RewardConfig.__module__

if __name__ == "__main__":
    code = "import trl; print(trl.RewardConfig.__module__)"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(*pool.map(where, [0]))
"""


@only_thorough
def test_processes_that_the_script_starts_see_the_same(tmp_path):
    done = run(tmp_path, CHILDREN)
    assert done.stdout == "trl_jax.trainer.reward_config\n" * 2, done.stderr


def test_a_scripts_own_exit_status_and_place(tmp_path):
    (tmp_path / "beside.py").write_text("CODE = 7")
    assert run(tmp_path, "import sys, beside\nsys.exit(beside.CODE)").returncode == 7
    assert run(tmp_path, "import beside\nprint(beside.CODE)", how=["-m", "script"]).stdout == "7\n"


@only_thorough
def test_nothing_to_run(tmp_path):
    done = run(tmp_path, "", how=["none.py"])
    assert done.returncode == 2 and done.stderr.startswith("python -m trl_jax: there is no script 'none.py'.\nusage:")
    done = run(tmp_path, "", how=["check", "none.py"])
    assert done.stderr.startswith("python -m trl_jax: there is no script 'check'. The command is trl-jax check.\n")
    done = run(tmp_path, "", how=["--help"])
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m trl_jax SCRIPT.py [ARGUMENTS]")


FLAGS = """
import warnings
from dataclasses import dataclass
from transformers import HfArgumentParser, TrainingArguments
@dataclass
class Own:
    torch_dtype: str = "auto"
parser = HfArgumentParser((Own, TrainingArguments))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    own, args = parser.parse_args_into_dataclasses()
places = [warning.filename.rpartition("/")[2] for warning in told if "old name" in str(warning.message)]
print(own.torch_dtype, args.eval_strategy.value, args.warmup_steps, *places)
"""


@only_thorough
def test_transformers_own_parser_takes_old_flags_there(tmp_path):
    flags = ["--output_dir", "out", "--evaluation_strategy", "steps", "--warmup_ratio=0.1", "--torch_dtype", "bfloat16"]
    done = run(tmp_path, FLAGS, how=["script.py", *flags])
    assert done.stdout.splitlines() == ["bfloat16 steps 0.1 script.py script.py"], done.stderr


CELLS = """
import transformers
from transformers import TrainingArguments
import trl_jax
trl_jax.load_ipython_extension(None)  # what %load_ext trl_jax calls
trl_jax.install()
from trl import SFTConfig
import warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    args = TrainingArguments("out", evaluation_strategy="steps")
print(SFTConfig.__module__, args.eval_strategy.value, len([one for one in told if "old name" in str(one.message)]))
"""


@only_thorough
def test_a_notebook_installs_it_in_a_cell(tmp_path):
    (tmp_path / "cells.py").write_text(CELLS)
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "cells.py"], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.stdout == "trl_jax.trainer.sft_config steps 1\n", done.stderr


def test_peft_takes_what_get_peft_config_returns():
    peft = pytest.importorskip("peft")
    module = SimpleNamespace(get_peft_model=lambda model, peft_config: peft_config)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "peft", peft)
        patched.setattr(peft, "get_peft_model", peft.get_peft_model)  # so that it is restored afterwards
        ADJUSTMENTS["peft.mapping_func"](module)
        given = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        made = module.get_peft_model("model", given)
        assert module.get_peft_model("model", made) is made
    assert isinstance(made, peft.LoraConfig) and (made.r, made.target_modules) == (4, {"q_proj"})


OLD_PLACES = [
    ("trl.trainer.utils", "DataCollatorForCompletionOnlyLM"),
    ("trl.trainer.utils", "RewardDataCollatorWithPadding"),
    ("trl.trainer.utils", "ConstantLengthDataset"),
    ("trl.trainer.utils", "SIMPLE_CHAT_TEMPLATE"),
    ("trl.commands.cli_utils", "init_zero_verbose"),
]


@pytest.mark.parametrize(("module", "name"), OLD_PLACES)
def test_names_are_where_scripts_of_2024_import_them(module, name):
    ours = module.replace("trl.commands.cli_utils", "trl.scripts.utils").replace("trl.", "trl_jax.")
    assert getattr(FrontModule(module), name) is getattr(importlib.import_module(ours), name)


def test_the_data_of_scripts_of_2024():
    module, words = FrontModule("trl.commands.cli_utils"), ["--sanity_check", "--dataset_name", "pairs.jsonl"]
    [args] = module.TrlParser(module.DPOScriptArguments).parse_args_into_dataclasses(words)
    assert (args.sanity_check, args.dataset_name, args.dataset_test_split) == (True, "pairs.jsonl", "test")
    rows = "timdettmers/openassistant-guanaco"
    assert module.SFTScriptArguments() == module.SFTScriptArguments(rows, gradient_checkpointing_use_reentrant=False)
    truth = FrontModule("trl.env_utils").strtobool
    assert truth("1") is truth("Yes") is True and truth("0") is truth("OFF") is False
    with pytest.raises(ValueError, match="^A truth value must be yes or no, .*, got 'maybe'"):
        truth("maybe")


def test_a_name_of_trl_core_says_what_stands_for_it():
    with pytest.raises(NotImplementedError, match="^TRL's LengthSampler .* Closest: max_completion_length of GRPO"):
        FrontModule("trl.core").LengthSampler(2, 4)


def test_tokenizers_have_their_former_methods():
    tokenizer = tiny_tokenizer()
    tokenizer.__class__ = type("Own", (type(tokenizer),), {})
    ADJUSTMENTS["transformers.tokenization_utils_base"](SimpleNamespace(PreTrainedTokenizerBase=type(tokenizer)))
    padded = {"padding": "max_length", "max_length": 16}
    assert tokenizer.encode_plus("bread", "soup", **padded).data == tokenizer("bread", "soup", **padded).data
    texts = ["bread", "soup and bread"]
    assert tokenizer.batch_encode_plus(texts, padding=True).data == tokenizer(texts, padding=True).data


def test_a_function_of_trl_that_a_script_replaces_is_named(caplog):
    module = FrontModule("trl.trainer.grpo_trainer")
    assert module.GRPOTrainer.__module__.startswith("trl_jax") and "replaced" not in caplog.text
    module.nanstd = max
    assert "The script replaced trl.trainer.grpo_trainer.nanstd" in caplog.text and module.nanstd is max
    module.mark, module.nanstd = 1, max  # a new name, and the same value again
    assert caplog.text.count("replaced") == 1 and module.mark == 1
