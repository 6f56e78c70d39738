"""`trl-jax check` follows names, reads notebooks and a script's own modules, and reports what it cannot judge."""

from __future__ import annotations

import json
import textwrap
from importlib.util import find_spec

import pytest

from trl_jax.cli.check import findings, report
from trl_jax.cli.main import main
from trl_jax.cli.reading import UNKNOWN, meanings, read, value_of

WORKS, CHANGED, REFUSED, NOT_KNOWN = "works", "changed", "refused", "not known"
needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")


def found(text, path=None):
    """What is reported about a script: what -> (kind, text)."""
    return {one.what: (one.kind, one.text) for one in findings(read(textwrap.dedent(text), path))}


def verdict(text):
    return report(findings(read(textwrap.dedent(text))))[-1]


def test_modules_and_names_that_do_not_exist():
    said = found("""
        from trl.experimental.ppo import PPOConfig, PPOTrainer
        from trl.trainer.utils import first_true_indices
        from trl_jax.trainer.nothing import Trainer
        from trl_jax import GKDConfig, PPOTrainer, SFTTrainer
        from trl_jax.experimental.kto import KTOConfig
        import trl.nowhere
        from transformers import AutoModelForNothing, AutoTokenizer
        import no_such_package.part, json
        try:
            from trl import GKDTrainer
        except ImportError:
            from trl.experimental.kto import KTOTrainer
    """)
    assert said["trl_jax.PPOTrainer"][0] == CHANGED
    assert said["trl_jax.SFTTrainer"] == said["trl_jax.experimental.kto.KTOConfig"] == (WORKS, "")
    for name in ("trl_jax.trainer.nothing.Trainer", "trl_jax.GKDConfig", "transformers.AutoModelForNothing"):
        assert said[name][0] == REFUSED, said[name]
    assert said["no_such_package"] == ("not installed", "The script stops at this import.")
    assert said["trl.GKDTrainer"][0] == CHANGED and "If this line is reached, it fails" in said["trl.GKDTrainer"][1]
    assert said["trl.experimental.kto.KTOTrainer"][0] == WORKS
    assert not {"transformers.AutoTokenizer", "json"} & said.keys()
    if find_spec("trl"):
        assert "Closest: GRPOTrainer" in said["trl.experimental.ppo.PPOTrainer"][1]
        for name in ("trl.experimental.ppo.PPOTrainer", "trl.trainer.utils.first_true_indices", "trl.nowhere"):
            assert said[name][0] == REFUSED, said[name]


@needs_trl
def test_trainers_of_the_installed_trl():
    text = """
        from trl.experimental.gold import GOLDConfig, GOLDTrainer
        trainer = GOLDTrainer(model="m", args=GOLDConfig("out"))
        trainer._whatever
    """
    said = found(text)
    assert set(said) == {"trl.experimental.gold.GOLDConfig", "trl.experimental.gold.GOLDTrainer"}
    assert all(kind == CHANGED and "trains with torch" in text for kind, text in said.values())
    assert (
        verdict(text) == "The script runs unchanged, if its data and checkpoints fit; 2 of 2 behave differently here."
    )
    shown = "from trl import SFTTrainer\nfrom trl.trainer.callbacks import WeaveCallback\nWeaveCallback(trainer=None)"
    assert found(shown)["trl.trainer.callbacks.WeaveCallback"][0] == NOT_KNOWN


ROLLOUT = """
    from functools import partial
    import trl as t
    from trl import GRPOTrainer as Base

    class Agent:
        def turn(self, owner, prompts):
            return owner._generate_single_turn(prompts)

    def helper(prompts, who):
        return who._tokenize_prompts(prompts)

    def make(limit):
        def rollout(prompts, trainer):
            ids = helper(prompts, who=trainer)
            trainer.model.generate(ids, max_new_tokens=limit)
            if hasattr(trainer, "vllm_client"):
                trainer.vllm_client.reset()
            return Agent().turn(trainer, ids), trainer.processing_class, trainer.vllm_generation
        return rollout

    class Mine(Base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.buffer = []
        def evaluate(self, *args, **kwargs):
            self.buffer.append(self._metrics)
            return super().evaluate(*args, **kwargs)
        def _calculate_rewards(self, inputs):
            return super()._calculate_rewards(inputs)

    trainer = Mine("m", reward_funcs=len, rollout_func=make(3))
    trainer._get_train_sampler = lambda: None
    trainer.neftune_noise_alpha = 3
    t.GRPOTrainer._prepare_inputs = None
    trainer.train()
    trainer.create_model_card()
"""


def test_private_methods_of_trainers():
    said = found(ROLLOUT)
    refused = {what for what, (kind, _) in said.items() if kind == REFUSED}
    assert refused == {
        "Mine._get_train_sampler = ...", "Mine.vllm_generation",
        "Mine.neftune_noise_alpha = ...", "GRPOTrainer._prepare_inputs = ...",
    }, refused  # fmt: skip
    assert "Call trainer._generate_single_turn(prompt_ids, None, {}" in said["Mine.vllm_generation"][1]
    assert said["Mine.evaluate"] == (WORKS, "") and said["trl.GRPOTrainer"] == (WORKS, "")


ARGUMENTS = """
    import importlib, os, torch
    from functools import partial
    from peft import LoraConfig
    from torch import nn
    from transformers import AutoModelForSequenceClassification, DataCollatorForSeq2Seq, Mxfp4Config
    import transformers
    from trl import CPOTrainer, DPOTrainer, GRPOTrainer, RewardTrainer, SFTConfig, SFTTrainer
    import verifiers_of_others as others

    class Net(nn.Module): ...
    def collate(processor):
        def inner(rows): ...
        return inner
    def score(completions, answer): return [0.0]
    def fine(completions, **kwargs): return [0.0]

    LENGTH, SHARE = 512, 0.5
    common = dict(learning_rat=1e-4, max_length=LENGTH // 2 + 1)
    more = {**common, "packing": not True}
    args = SFTConfig("out", **more, eval_steps=SHARE, optim="lomo" if SHARE else "sgd", **os.environ)
    model = AutoModelForSequenceClassification.from_pretrained("m", num_labels=2)
    quantized = transformers.AutoModel.from_pretrained("m", quantization_config=transformers.AwqConfig())
    unread = transformers.AutoModel.from_pretrained("m", quantization_config=Mxfp4Config())
    read = transformers.AutoModel.from_pretrained("m", quantization_config=Mxfp4Config(dequantize=not False))
    if os.environ.get("A"):
        collator = None
    else:
        collator = collate(None)
    SFTTrainer(Net(), args, collator, optimizers=(torch.optim.AdamW([]), None))
    SFTTrainer(model="m", data_collator=DataCollatorForSeq2Seq(None))
    SFTTrainer(model="m", data_collator=os.environ["C"])
    DPOTrainer("m", optimizers=(torch.optim.LBFGS([]), None))
    RewardTrainer(model=model, **os.environ)
    GRPOTrainer("m", [fine, score])
    CPOTrainer("m", data_collator=lambda rows: rows, model_init=None)
    others.EnvTrainer("m")
    importlib.import_module(os.environ["P"]).GRPOTrainer("m")
"""


def test_arguments_are_followed():
    said = found(ARGUMENTS)
    wanted = {
        "SFTConfig(learning_rat=0.0001)": (REFUSED, "did you mean learning_rate?"),
        "SFTConfig(max_length=257)": (WORKS, ""), "SFTConfig(packing=False)": (WORKS, ""),
        "SFTConfig(eval_steps=0.5)": (WORKS, ""), "SFTConfig(optim=...)": (WORKS, ""),
        "SFTConfig(**...)": (NOT_KNOWN, "made when the script runs"),
        "SFTTrainer(optimizers=...)": (WORKS, ""), "DPOTrainer(optimizers=...)": (REFUSED, "optax"),
        "RewardTrainer(**...)": (NOT_KNOWN, ""),
        "RewardTrainer(model=...)": (REFUSED, "num_labels=1"), "score(completions, answer)": (REFUSED, "add **kwargs"),
        "quantization_config=AwqConfig(...)": (REFUSED, "BitsAndBytesConfig"),
        "quantization_config=Mxfp4Config(...)": (REFUSED, "dequantize=True"),
        "CPOTrainer(data_collator=...)": (REFUSED, "leave it out"), "CPOTrainer(model_init=...)": (WORKS, ""),
        "verifiers_of_others.EnvTrainer(...)": (NOT_KNOWN, "Another package's trainer"),
        "GRPOTrainer(...)": (NOT_KNOWN, "known only when the script runs"),
    }  # fmt: skip
    for what, (kind, text) in wanted.items():
        assert said[what][0] == kind and text in said[what][1], (what, said[what])
    of_collator = [one for one in findings(read(textwrap.dedent(ARGUMENTS))) if "SFTTrainer(data_" in one.what]
    assert [one.kind for one in of_collator] == [CHANGED, WORKS, NOT_KNOWN]
    of_model = [one for one in findings(read(textwrap.dedent(ARGUMENTS))) if "SFTTrainer(model" in one.what]
    assert [one.kind for one in of_model] == [REFUSED, WORKS, WORKS] and "transformers' classes" in of_model[0].text


def test_arguments_that_moved_to_the_config():
    said = found("""
        from trl import GRPOTrainer, SFTConfig, SFTTrainer
        SFTTrainer("m", packing=True)
        GRPOTrainer("m", len, beta=0.1, max_prompt_length=3)
        SFTTrainer("m", SFTConfig("out"), max_seq_length=8)
    """)
    assert said["SFTTrainer(packing=...)"] == (
        REFUSED, "SFTTrainer has no argument 'packing'. Pass args=SFTConfig(packing=...).",
    )  # fmt: skip
    assert said["GRPOTrainer(beta=...)"][0] == REFUSED
    assert said["GRPOTrainer(max_prompt_length=...)"][0] == said["SFTTrainer(max_seq_length=...)"][0] == CHANGED


def test_sizes_that_fit_several_devices_only():
    said = found("from trl import GRPOConfig\nGRPOConfig('out', per_device_train_batch_size=1)")
    assert said["GRPOConfig(per_device_train_batch_size=1)"][0] == WORKS
    kind, text = said["GRPOConfig(...)"]
    assert kind == NOT_KNOWN and text.startswith("On one device: generation_batch_size (1) must be divisible")
    fits = found("from trl import GRPOConfig\nGRPOConfig('out', per_device_train_batch_size=1, num_generations=2,"
                 "gradient_accumulation_steps=4)")  # fmt: skip
    assert "GRPOConfig(...)" not in fits and {kind for kind, _ in fits.values()} == {WORKS}
    unknown = found("import sys\nfrom trl import GRPOConfig\nGRPOConfig('out', per_device_train_batch_size=1,"
                    "num_generations=int(sys.argv[1]))")  # fmt: skip
    assert {kind for kind, _ in unknown.values()} == {WORKS}
    assert found("from trl import SFTTrainer\nrows = ...\nSFTTrainer('m', train_dataset=rows)")[
        "SFTTrainer(train_dataset=...)"
    ] == (REFUSED, "The script leaves it open: it passes `...`.")


def test_names_that_nothing_defines():
    text = """
        from trl import SFTTrainer
        def later():
            global made
            made = [unknown for unknown in made]
        with open(__file__) as file, (yes := file):
            match file.read(), yes:
                case [first, *rest]: print(first, rest)
        SFTTrainer("m", train_dataset=dataset, eval_dataset=made)
    """
    assert found(text)["dataset"] == (REFUSED, "This name is not defined, under TRL, too.")
    assert {"made", "unknown", "file", "first", "rest", "yes"}.isdisjoint(found(text))
    assert found("from somewhere import *\n" + textwrap.dedent(text))["dataset"][0] == NOT_KNOWN
    with pytest.raises(SyntaxError, match="keyword argument repeated"):
        read("print(sep='', sep='')")


def test_a_tokenizer_that_the_trainer_does_not_get():
    said = found("""
        from trl import SFTTrainer, setup_chat_format
        from transformers import AutoModelForCausalLM, AutoTokenizer
        model, tokenizer = setup_chat_format(AutoModelForCausalLM.from_pretrained("m"), AutoTokenizer("m"))
        SFTTrainer(model)
    """)
    assert said["SFTTrainer(...)"][0] == NOT_KNOWN and "processing_class=tokenizer" in said["SFTTrainer(...)"][1]
    said = found("from trl import DPOTrainer as T\nt = object()\nt.chat_template = 'a'\nT('m', tokenizer=t)")
    assert said.keys() == {"trl.DPOTrainer", "DPOTrainer(model=...)", "DPOTrainer(tokenizer=...)"}


def test_the_verdict_admits_what_is_not_known():
    unknown = "import os\nfrom trl import SFTTrainer\nSFTTrainer('m', **os.environ)"
    assert verdict(unknown).startswith("Nothing is refused, but 1 of 3 cannot be judged before the script runs")
    missing = "import no_such_package\nfrom trl import SFTTrainer"
    assert (
        verdict(missing)
        == "Not installed here: no_such_package. With it: the script runs unchanged, if its data and checkpoints fit."
    )
    assert verdict("from unsloth import FastLanguageModel\nfrom trl import SFTTrainer").startswith("1 of 2 is refused")


CELLS = [
    "!pip install -q trl \\\n    peft\n%load_ext trl_jax\nimport os",
    "%%bash\necho no python [",
    "  # indented as a whole\n  files = !ls\n  from trl import SFTConfig, SFTTrainer",
    "%%time\nargs = SFTConfig('out', max_seq_length=8)\ndef collate(rows):\n    return rows",
    "await something()\nSFTTrainer('m', args=args, data_collator=collate)\nSFTTrainer?",
    "broken (",
]


def notebook(cells, language="python"):
    code = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    text = {"cell_type": "markdown", "source": "not (code"}
    return json.dumps({"cells": [text, *code], "metadata": {"kernelspec": {"language": language}}})


def test_notebooks(tmp_path, capsys):
    (tmp_path / "it.ipynb").write_text(notebook(CELLS))
    assert main(["check", str(tmp_path / "it.ipynb")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "cell 3, line 3  trl.SFTConfig: works" in lines
    assert any(line.startswith("cell 4, line 2  SFTConfig(max_seq_length=8): changed") for line in lines)
    assert any(line.startswith("cell 5, line 2  SFTTrainer(data_collator=...): changed") for line in lines)
    assert any(line.startswith("cell 6, line 1  code: not known. This cell is not valid Python") for line in lines)
    for broken in ("no json", "[]", notebook([], "R")):
        (tmp_path / "no.ipynb").write_text(broken)
        assert main(["check", str(tmp_path / "no.ipynb")]) == 2
        assert "is not a valid notebook of Python cells" in capsys.readouterr().err


def test_modules_of_the_script(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "parts" / "base.py").write_text(
        "from trl import SFTTrainer\nfrom .names import *\nclass Base(SFTTrainer):\n    def _evaluate(self): ...\n"
    )
    (tmp_path / "parts" / "names.py").write_text("import trl\nLENGTH = 5\nraise RuntimeError('it was run')\n")
    (tmp_path / "broken.py").write_text("def")
    script = tmp_path / "it.py"
    script.write_text(
        "import broken\nfrom parts.base import Base, LENGTH\nfrom trl import SFTConfig\n"
        "class Mine(Base):\n    def compute(self):\n        return self._nothing, self._evaluate\n"
        "Mine('m', args=SFTConfig('out', max_length=LENGTH), nothing=1)\n"
    )
    said = findings(read(script.read_text(), script))
    assert ("parts/base.py:4", "Base._evaluate", REFUSED) in [(one.place, one.what, one.kind) for one in said]
    above = tmp_path / "scripts" / "it.py"
    above.parent.mkdir()
    above.write_text("from parts.base import Base\nBase('m')")
    said_of_above = [(one.what, one.kind) for one in findings(read(above.read_text(), above))]
    assert ("parts", "not installed") in said_of_above and ("Base._evaluate", REFUSED) in said_of_above
    by_name = {one.what: one.kind for one in said}
    assert by_name["Mine._nothing"] == by_name["Mine(nothing=...)"] == REFUSED
    assert by_name["SFTConfig(max_length=5)"] == WORKS and by_name["code"] == NOT_KNOWN


def test_folders_that_a_script_adds_to_its_path(tmp_path):
    (tmp_path / "src" / "parts").mkdir(parents=True)
    (tmp_path / "src" / "parts" / "base.py").write_text("from trl import SFTConfig\nSFTConfig('out', optim='lomo')")
    script = tmp_path / "scripts" / "it.py"
    script.parent.mkdir()
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        "sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'src'))\nimport parts.base\n"
    )
    said = {one.what: one.kind for one in findings(read(script.read_text(), script))}
    assert "parts" not in said and said["SFTConfig(optim='lomo')"] == REFUSED


@pytest.mark.parametrize(("text", "kind"), [
    ("ids = t.apply_chat_template(m, add_generation_prompt=True)\nprint(len(ids))", REFUSED),
    ("ids = t.apply_chat_template(m, return_tensors='pt').to('cuda')\nmodel.generate(ids)", REFUSED),
    ("def map_(row):\n    return t.apply_chat_template(row['m'])", NOT_KNOWN),
    ("def map_(row):\n    ids = t.apply_chat_template(row['m'])\n    return {'input_ids': ids}", REFUSED),
    ("t.apply_chat_template(m)['input_ids']", None),
    ("found = t.apply_chat_template(m, return_tensors='pt').to('cuda')\nmodel.generate(**found)", None),
    ("found = t.apply_chat_template(m)\nprint(found.input_ids)", None),
    ("found = t.apply_chat_template(m)\nprint(found['input_ids'], {**found})", None),
    ("AS = False\ntext = t.apply_chat_template(m, tokenize=AS)", None),
    ("text = t.apply_chat_template(m, return_dict=False)", None),
    ("text = t.apply_chat_template(m, **options)", None),
])  # fmt: skip
def test_token_ids_of_chat_templates(text, kind):
    said = found("from somewhere import m, t, model, options\nfrom trl import SFTTrainer\n" + text)
    assert (said["apply_chat_template(...)"][0] if kind else said.get("apply_chat_template(...)")) == kind


def test_values_and_names():
    module = read(textwrap.dedent("""
        a = 3
        b = {"x": [a, -a], **{}}
        if a:
            a = 4
        c = a
        d = a * 10 ** 9
        e = f"{a}"
        loop = loop
        def f(n):
            return n
        deep = f(f)(1)
    """))  # fmt: skip
    last = {name: bound[-1].value for name, bound in module.top.bindings.items()}
    assert value_of(last["c"], module.top) is UNKNOWN  # may be 3 or 4
    assert value_of(last["b"], module.top) is UNKNOWN and value_of(last["e"], module.top) is UNKNOWN
    assert value_of(last["loop"], module.top) is UNKNOWN and len(meanings(last["deep"], module.top)) == 1
