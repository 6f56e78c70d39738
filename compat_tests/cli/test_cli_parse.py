"""Flags, YAML and named datasets: TrlParser against TRL's, and messages of the command line."""

import argparse
import dataclasses
import gzip
import json
import os
import re
import subprocess
import sys
import types
from dataclasses import dataclass, field

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from trl_jax.cli.main import main
from trl_jax.scripts import reward, train
from trl_jax.scripts.data import load_splits
from trl_jax.scripts.utils import ScriptArguments, TrlParser
from trl_jax.trainer.model_config import ModelConfig
from trl_jax.trainer.reward_config import RewardConfig
from trl_jax.trainer.rloo_config import RLOOConfig


@dataclass
class Flags:
    size: int = 3
    limit: int | None = 7
    share: float | None = 0.5
    name: str | None = "a"
    names: list[str] | None = None
    on: bool = False
    off: bool = True
    maybe: bool | None = None
    pad: int | str | None = "auto"
    extra: dict | str | None = None
    kind: str = field(default="x", metadata={"choices": ["x", "y"]})


@dataclass
class Needs:
    must: int


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def yaml_file(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


CASES = [
    [], ["--size", "5"], ["--limit", "None"], ["--limit", "null"], ["--limit", "4"], ["--share", "none"],
    ["--share", "0.25"], ["--name", "None"], ["--names", "a", "b"], ["--on"], ["--on", "true"], ["--no_off"],
    ["--no-off"], ["--off", "False"], ["--maybe", "yes"], ["--pad", "none"], ["--pad", "64"],
    ["--extra", '{"a": 1}'], ["--kind", "y"], ["--size=9"],
]  # fmt: skip


@pytest.mark.parametrize("args", CASES, ids=" ".join)
def test_flags_mean_what_they_mean_in_trl(args):
    trl = pytest.importorskip("trl")
    assert TrlParser(Flags).parse_args_and_config(args) == trl.TrlParser(Flags).parse_args_and_config(args)


@pytest.mark.parametrize("args", [["--size", "None"], ["--size", "abc"], ["--limit", "abc"], ["--kind", "z"],
                                  ["--maybe", "None"], ["--size"]], ids=" ".join)  # fmt: skip
def test_flags_that_trl_refuses_too(args, capsys):
    trl = pytest.importorskip("trl")
    for parser in (trl.TrlParser(Flags), TrlParser(Flags)):
        with pytest.raises(SystemExit) as stop:
            parser.parse_args_and_config(args)
        assert stop.value.code == 2
    theirs, ours = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert ours.partition("error: ")[2] == theirs.partition("error: ")[2]


YAMLS = [
    "size: 5", "limit: null", "limit: None", "share: 1e-3", "names: [a, b]", "'on': true", "'off': no",
    "extra: {a: 1}", "pad: 8", "kind: y", "size: 4\nlimit: 9",
]  # fmt: skip


@pytest.mark.parametrize("text", YAMLS)
@pytest.mark.parametrize("args", [[], ["--size", "11"]], ids=["yaml", "flag wins"])
def test_yaml_means_what_it_means_in_trl(tmp_path, text, args):
    trl = pytest.importorskip("trl")
    args = ["--config", yaml_file(tmp_path, text), *args]
    assert TrlParser(Flags).parse_args_and_config(args) == trl.TrlParser(Flags).parse_args_and_config(args)


def test_leftovers_are_handed_over_as_trl_does(tmp_path):
    trl = pytest.importorskip("trl")
    args = ["--config", yaml_file(tmp_path, "size: 5\nother: 1"), "--more", "2"]
    for how in (dict(return_remaining_strings=True),
                dict(return_remaining_strings=True, separate_remaining_strings=True)):  # fmt: skip
        ours = TrlParser(Flags).parse_args_and_config(args, **how)
        assert ours == trl.TrlParser(Flags).parse_args_and_config(args, **how)
        assert ours[0].size == 5 and "--more" in ours[-1]
    [parsed] = TrlParser(Flags).parse_args_and_config(args[:2], fail_with_unknown_args=False)
    assert parsed.size == 5


def test_a_required_flag_may_stand_in_the_file(tmp_path):
    [parsed] = TrlParser(Needs).parse_args_and_config(["--config", yaml_file(tmp_path, "must: 4")])
    assert parsed.must == 4


def test_config_with_an_equals_sign(tmp_path):
    [parsed] = TrlParser(Flags).parse_args_and_config([f"--config={yaml_file(tmp_path, 'size: 4')}", "--limit", "1"])
    assert (parsed.size, parsed.limit) == (4, 1)


def test_several_dataclasses_and_subparsers(tmp_path):
    both = TrlParser((Flags, Needs)).parse_args_and_config(["--must", "1", "--size", "2"])
    assert both == (Flags(size=2), Needs(must=1))
    top = TrlParser()
    top.add_subparsers().add_parser("run", dataclass_types=(Needs,))
    assert top.set_defaults_with_config(must=3, other=1) == ["--other", "1"]


def test_env_block(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_JAX_TEST_VARIABLE", "")
    TrlParser(Flags).parse_args_and_config(["--config", yaml_file(tmp_path, "env: {TRL_JAX_TEST_VARIABLE: 12}")])
    assert os.environ["TRL_JAX_TEST_VARIABLE"] == "12"


@pytest.mark.parametrize("text, message", [
    ("siez: 1", "{path}: unknown key siez: did you mean size?"),
    ("- 1", "{path} must have flags as keys, such as `max_steps: 10`, got a list."),
    ("", "{path} must have flags as keys, such as `max_steps: 10`, got a NoneType."),
    ("env: 3", "{path}: `env` field should be a dict in the YAML file. Got env=3."),
    ("on: true", "{path}: keys must be names of flags, got [True]."),
    ("kind: z", "kind in the config file must be one of ['x', 'y'], got 'z'."),
])  # fmt: skip
def test_bad_yaml(tmp_path, text, message):
    path = yaml_file(tmp_path, text)
    with pytest.raises(ValueError) as error:
        TrlParser(Flags).parse_args_and_config(["--config", path])
    assert str(error.value) == message.format(path=path)


def test_yaml_from_a_pipe():
    """As in --config <(envsubst < dpo.yaml)."""
    read, write = os.pipe()
    os.write(write, b"size: 4")
    os.close(write)
    assert TrlParser(Flags).parse_args_and_config(["--config", f"/dev/fd/{read}"])[0].size == 4
    os.close(read)


def test_no_yaml(tmp_path):
    with pytest.raises(ValueError, match="is not valid YAML"):
        TrlParser(Flags).parse_args_and_config(["--config", yaml_file(tmp_path, "a: [")])
    with pytest.raises(FileNotFoundError, match="--config none.yaml: there is no such file."):
        TrlParser(Flags).parse_args_and_config(["--config", "none.yaml"])
    with pytest.raises(FileNotFoundError, match=re.escape(f"--config {tmp_path}: there is no such file.")):
        TrlParser(Flags).parse_args_and_config(["--config", str(tmp_path)])
    with pytest.raises(ValueError, match="--config has no value: write --config FILE.yaml."):
        TrlParser(Flags).parse_args_and_config(["--config"])


@pytest.mark.parametrize("args, text", [
    (["--siez", "1"], "unknown argument --siez: did you mean size?"),
    (["--torch-dtype=float32"], "unknown argument --torch_dtype: use dtype."),
    (["stray"], "unexpected 'stray': a value must follow its flag, as in --max_steps 10."),
])  # fmt: skip
def test_unknown_flags(args, text):
    with pytest.raises(ValueError) as error:
        TrlParser(Flags).parse_args_and_config(args)
    assert str(error.value) == text


def told(words, text):
    """The arguments parsed from flags and an optional YAML file, and the warnings about old names."""
    parser = TrlParser(RewardConfig)
    with pytest.warns(FutureWarning) as seen:
        [args] = parser.parse_args_and_config(words if text is None else ["--config", text, *words])
    return args, [str(warning.message) for warning in seen if "old name" in str(warning.message)]


OLD = [
    (["--warmup_ratio", "0.1"], "warmup_steps", 0.1),
    (["--warmup-ratio=0.1"], "warmup_steps", 0.1),
    (["--evaluation_strategy", "steps", "--eval_steps", "2"], "eval_strategy", "steps"),
    (["--group_by_length"], "train_sampling_strategy", "group_by_length"),
    (["--group_by_length", "False"], "train_sampling_strategy", "random"),
    (["--max_seq_length", "32"], "max_length", 32),
    (["--no_cuda"], "use_cpu", True),
    (["--push_to_hub_model_id", "a/b"], "hub_model_id", "a/b"),
    # Steps have always taken precedence.
    (["--warmup_ratio", "0.1", "--warmup_steps", "3", "--no_cuda"], "warmup_steps", 3),
    (["--warmup_ratio", "0.1", "--warmup_steps", "0"], "warmup_steps", 0.1),  # unless they are 0
]


@pytest.mark.parametrize("words, wanted", [(["--bf16"], True), (["--bf16", "False"], False), ([], True)])
def test_a_truth_may_stand_alone(words, wanted):
    words = ["--output_dir", "out", *words, "--tf32", "--logging_steps", "2"]
    [args] = TrlParser(RewardConfig).parse_args_and_config(words)
    assert (args.bf16, args.tf32, args.logging_steps) == (wanted, True, 2)


@pytest.mark.parametrize("words, name, wanted", OLD, ids=lambda value: str(value))
def test_old_names_of_flags(words, name, wanted):
    args, notes = told(["--output_dir", "out", "--bf16", "False", *words], None)
    assert getattr(args, name) == wanted and len(notes) <= 1


def test_old_names_in_yaml_and_beside_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "")
    lines = ("output_dir: out", "bf16: false", "warmup_ratio: 0.2", "evaluation_strategy: steps", "logging_dir: logs")
    text = "\n".join((*lines, "torchdynamo: x"))
    args, notes = told([], yaml_file(tmp_path, text))
    assert (args.warmup_steps, args.eval_strategy.value) == (0.2, "steps") and len(notes) == 3
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == "logs"
    args, _ = told(["--warmup_steps", "5"], yaml_file(tmp_path, text))
    assert args.warmup_steps == 5


@pytest.mark.parametrize("ours_first", [False, True])
def test_an_argument_that_trl_lacks_is_left_to_a_script_that_has_one_of_its_name(ours_first):
    @dataclass
    class Script:
        reward_model_path: str | None = None
        max_prompt_length: int = 7

    kinds = (RLOOConfig, Script) if ours_first else (Script, RLOOConfig)
    words = ["--output_dir", "out", "--reward_model_path", "judge", "--max_completion_length", "9"]
    parsed = TrlParser(kinds).parse_args_and_config(words)
    config, script = parsed if ours_first else parsed[::-1]
    assert (script.reward_model_path, script.max_prompt_length) == ("judge", 7)
    assert isinstance(config, RLOOConfig) and config.max_completion_length == 9
    assert config.reward_model_path is None and config.max_prompt_length is None
    [alone] = TrlParser(RLOOConfig).parse_args_and_config(words)
    assert alone.reward_model_path == "judge" and type(alone) is RLOOConfig


def test_config_is_a_taken_name():
    @dataclass
    class Taken:
        config: str = ""

    with pytest.raises(ValueError, match="Taken has a field named 'config', but --config names .* Rename it."):
        TrlParser(Taken)


def test_parsing_leaves_the_dataclass_as_it_was():
    before = {f.name: f.type for f in dataclasses.fields(RewardConfig)}
    reward.make_parser()
    assert {f.name: f.type for f in dataclasses.fields(RewardConfig)} == before


def test_script_arguments_are_trls():
    trl = pytest.importorskip("trl")
    ours, theirs = (
        [(f.name, f.default) for f in dataclasses.fields(c)] for c in (ScriptArguments, trl.ScriptArguments)
    )
    assert ours == theirs


def test_the_reward_parser_reads_trls_flags(tmp_path):
    config = yaml_file(
        tmp_path, "learning_rate: 2.0e-5\nmax_length: null\nmodel_init_kwargs: {revision: x}\nbf16: false"
    )
    args = [
        "--model_name_or_path",
        "m",
        "--dataset_name",
        "d",
        "--config",
        config,
        "--output_dir",
        "out",
        "--center_rewards_coefficient",
        "0.01",
        "--pad_to_multiple_of",
        "none",
        "--optim",
        "adamw_torch",
    ]
    script, training, model, mixture = reward.make_parser().parse_args_and_config(args)
    assert (script.dataset_name, model.model_name_or_path, model.dtype) == ("d", "m", "float32")
    assert (training.learning_rate, training.max_length, training.center_rewards_coefficient) == (
        2e-5,
        None,
        0.01,
    )
    assert training.model_init_kwargs == {"revision": "x"} and training.bf16 is False
    assert training.pad_to_multiple_of is None and mixture.datasets == []


def test_the_reward_parser_as_a_subcommand():
    top = TrlParser(prog="trl-jax")
    parser = reward.make_parser(top.add_subparsers())
    assert parser.parse_args_and_config(["--max_length", "None"])[1].max_length is None


class Recorder:
    """Replaces RewardTrainer and records its arguments."""

    def __init__(self, **kwargs):
        self.given, self.done = kwargs, []
        Recorder.last = self

    def train(self, resume_from_checkpoint=None):
        self.done.append(("train", resume_from_checkpoint))

    def save_model(self, folder):
        self.done.append(("save", folder))

    hub_model_id = "me/judge"

    def push_to_hub(self, dataset_name):
        self.done.append(("push", dataset_name))


@pytest.fixture
def recorder(monkeypatch):
    module = types.ModuleType("trl_jax.trainer.reward_trainer")
    module.RewardTrainer = Recorder
    monkeypatch.setitem(sys.modules, "trl_jax.trainer.reward_trainer", module)
    return Recorder


ROWS = [{"chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(4)]


@pytest.fixture
def pairs(tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def test_a_run_from_the_command_line(pairs, recorder, capsys):
    code = main(["reward", "--model_name_or_path", "m", "--dataset_name", str(pairs), "--output_dir", "out",
                 "--eval_strategy", "steps", "--model_init_kwargs", '{"dtype": "bfloat16"}'])  # fmt: skip
    assert code == 0, capsys.readouterr().err
    given = recorder.last.given
    assert given["model"] == "m" and given["train_dataset"].to_list() == ROWS and len(given["eval_dataset"]) == 4
    assert given["args"].model_init_kwargs == {"revision": "main", "dtype": "bfloat16"}
    assert recorder.last.done == [("train", None), ("save", "out")]
    assert capsys.readouterr().out == "Training completed.\nModel saved to out.\n"


def test_a_run_changes_none_of_its_arguments(pairs, recorder):
    script, model = ScriptArguments(dataset_name=str(pairs)), ModelConfig(model_name_or_path="m")
    training = RewardConfig("out")
    before = training.to_dict()
    reward.main(script, training, model)
    assert training.to_dict() == before and recorder.last.given["eval_dataset"] is None


NOT_HERE = "is not in this release of trl_jax"


@pytest.mark.parametrize(
    "args, text",
    [
        (
            ["--load_in_8bit"],
            "--load_in_4bit and --load_in_8bit need --use_peft: quantized weights cannot be trained.",
        ),
        ([], "--model_name_or_path is missing: pass the folder or the Hub id of a checkpoint."),
        (
            ["--model_name_or_path", "m"],
            "--dataset_name is missing: pass a Hub id, a folder, or a jsonl or parquet file of pairs.",
        ),
        (
            ["--model_name_or_path", "m", "--dataset_name", "./none.jsonl"],
            "dataset './none.jsonl': no such file or folder, and not a Hub id.",
        ),
        (
            ["--model_name_or_path", "m", "--dataset_name", "pairs", "--dataset_train_split", "all"],
            "--dataset_train_split all: pairs has train, test. Use one of these.",
        ),
        (
            [
                "--model_name_or_path",
                "m",
                "--dataset_name",
                "pairs",
                "--eval_strategy",
                "epoch",
                "--dataset_test_split",
                "dev",
            ],
            ("--dataset_test_split dev: pairs has train, test. Use one of these, or train with --eval_strategy no."),
        ),
        (
            ["--optim", "lomo"],
            f"optim='lomo' {NOT_HERE}; the closest supported optimizer is adafactor.",
        ),
        (
            ["--evaluation_strategy", "steps", "--eval_strategy", "no"],
            "evaluation_strategy='steps' and eval_strategy='no' are the same argument. Leave evaluation_strategy out.",
        ),
        (
            ["--activation_offloading", "--gradient_checkpointing", "false", "--optim_target_modules", "q_proj"],
            (
                f"optim_target_modules='q_proj' {NOT_HERE}: it is for GaLore and APOLLO, which are not supported; "
                "leave it out. activation_offloading=True requires gradient_checkpointing=True, whose saved "
                "activations it moves to the host, got False."
            ),
        ),
    ],
)
def test_a_mistake_is_told_in_one_line(pairs, args, text, capsys):
    assert main(["reward", *args]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"trl-jax: error: {text} (TRL_JAX_TRACEBACK=1 shows the traceback.)\n")


def a_run_that_raises(error, monkeypatch):
    def run(*args):
        raise error

    monkeypatch.setattr(reward, "main", run)
    return main(["reward"])


@pytest.mark.parametrize("error", [KeyError("it's not\n reported"), ValueError("it's not reported")])
def test_an_error_prints_as_a_sentence(error, monkeypatch, capsys):
    error.add_note("Row 1 of train_dataset.")
    assert a_run_that_raises(error, monkeypatch) == 2
    told = "it's not reported Row 1 of train_dataset. (TRL_JAX_TRACEBACK=1 shows the traceback.)"
    assert capsys.readouterr().err == f"trl-jax: error: {told}\n"


def test_what_no_user_causes_keeps_its_traceback(monkeypatch):
    with pytest.raises(AssertionError, match="ours"):
        a_run_that_raises(AssertionError("ours"), monkeypatch)


def test_the_run_is_resumed_where_the_flags_say_so(recorder, pairs):
    args = ["--model_name_or_path", "m", "--dataset_name", str(pairs), "--resume_from_checkpoint", "out/a"]
    assert main(["reward", *args]) == 0
    assert recorder.last.done[0] == ("train", "out/a")


def test_what_was_trained_is_pushed_where_the_flags_say_so(recorder, pairs, capsys):
    args = ["--model_name_or_path", "m", "--dataset_name", str(pairs), "--push_to_hub"]
    assert main(["reward", *args]) == 0
    assert recorder.last.done[-1] == ("push", str(pairs))
    assert "Model pushed to me/judge." in capsys.readouterr().out


def named(*kinds):
    return {name for name, line in RewardConfig.argument_table().items() if line.how in kinds}


def test_help_ends_with_what_is_refused_and_what_has_no_effect(capsys):
    with pytest.raises(SystemExit):
        main(["reward", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    _, _, lists = text.partition("Accepted without effect: ")
    no_effect, _, refused = lists.removesuffix(".").partition(". Refused in this release: ")
    assert set(no_effect.split(", ")) == named("silent", "warned") | {"ignore_bias_buffers", "bnb_4bit_quant_storage"}
    assert set(refused.split(", ")) == named("refused")
    assert not [name for name in (*no_effect.split(", "), *refused.split(", ")) if f"--{name} " in text]


def test_starting_imports_neither_jax_nor_transformers():
    code = "import sys, trl_jax.cli.main as m; m.main([]); print({'jax', 'transformers', 'torch'} & set(sys.modules))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert run.stdout.endswith("set()\n"), run.stderr


def test_env_of_the_yaml_file_is_set_before_libraries_read_it(tmp_path):
    """TRL's command sets it for the process that trains: there, the constants are these."""
    (tmp_path / "run.yaml").write_text("env:\n  HF_HOME: /home-of-hf\n  HF_HUB_OFFLINE: 1\n")
    code = (
        "import trl_jax.cli.main as m; print(m.main(['sft', '--config', 'run.yaml'])); "  # no --model_name_or_path
        "import huggingface_hub.constants as hub; print(hub.HF_HOME, hub.HF_HUB_OFFLINE)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "0"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert run.stdout == "2\n/home-of-hf True\n", run.stderr


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "parquet", "csv"])
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
def test_one_file(tmp_path, kind, streaming):
    path = tmp_path / f"pairs.{kind}"
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind in ("parquet", "csv"):
        {"parquet": Dataset.to_parquet, "csv": Dataset.to_csv}[kind](Dataset.from_list(ROWS), str(path))
    else:
        path.write_text(json.dumps(ROWS) if kind == "json" else lines)
    splits = load_splits(str(path), streaming=streaming)
    assert list(splits) == ["train"] and list(splits["train"]) == ROWS
    assert isinstance(splits["train"], IterableDataset if streaming else Dataset)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
def test_folders(tmp_path, pairs, streaming):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:2])).save_to_disk(tmp_path / "two")
    assert {k: list(v) for k, v in load_splits("one", streaming=streaming).items()} == {"train": ROWS}
    two = load_splits("two", streaming=streaming)
    assert {k: list(v) for k, v in two.items()} == {"train": ROWS, "test": ROWS[:2]}
    files = load_splits(str(pairs), streaming=streaming)
    assert {k: list(v) for k, v in files.items()} == {"train": ROWS, "test": ROWS}
    assert isinstance(two["train"], IterableDataset if streaming else Dataset)


@pytest.mark.parametrize(
    "name, config, error, text",
    [
        (
            "none.jsonl",
            None,
            FileNotFoundError,
            "dataset 'none.jsonl': no such file or folder, and not a Hub id.",
        ),
        (
            "a/b/c",
            None,
            FileNotFoundError,
            "dataset 'a/b/c': no such file or folder, and not a Hub id.",
        ),
        (
            "empty",
            None,
            FileNotFoundError,
            "dataset folder empty has no .jsonl, .json, .parquet, .csv file and was not saved with save_to_disk.",
        ),
        (
            "notes.txt",
            None,
            ValueError,
            (
                "The suffix of a dataset file must be .jsonl, .json, .parquet, .csv, or one of these with .gz, got "
                "notes.txt."
            ),
        ),
        (
            "zero.jsonl",
            None,
            ValueError,
            "dataset file zero.jsonl is empty.",
        ),
        (
            "zero.jsonl",
            "en",
            ValueError,
            "dataset_config='en': zero.jsonl has no configurations. Leave dataset_config out.",
        ),
    ],
)
def test_bad_names(tmp_path, name, config, error, text):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "zero.jsonl").write_text("")
    with pytest.raises(error) as caught:
        load_splits(name, config)
    assert str(caught.value) == text


def test_a_plain_parser_shows_its_help():
    parser = TrlParser(Flags, prog="p")
    assert isinstance(parser, argparse.ArgumentParser) and "--limit INT" in parser.format_help()


def test_ignore_bias_buffers_is_warned_of():
    script = ScriptArguments(dataset_name="d", ignore_bias_buffers=True)
    with pytest.warns(UserWarning, match="--ignore_bias_buffers has no effect in trl_jax: there are no"):
        train.check_flags(script, ModelConfig(model_name_or_path="m"))
