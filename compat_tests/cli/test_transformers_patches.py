"""`python -m trl_jax` defers imports of transformers' models and PEFT until a script needs them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
import transformers

from compat_tests.effort import only_thorough
from compat_tests.hub.vision.processors import built_processor
from compat_tests.trainer.vision_models import pictures, tiny_tiled
from trl_jax.cli.transformers_patches import accept_no_videos, load_pixtral_processor, load_without_videos

SCRIPT = """
import sys
from trl_jax.cli.transformers_patches import import_without_models
import_without_models()
from trl_jax import SFTConfig, SFTTrainer
SFTConfig("out", use_cpu=True)
assert not {"peft", "transformers.modeling_utils"} & sys.modules.keys()

import transformers
transformers.LlamaConfig()
assert "torch.distributed.tensor" not in sys.modules
from transformers.distributed import sharding_utils
from torch.distributed.tensor import DTensor, Shard
assert isinstance(Shard(0), sharding_utils.Shard) and not isinstance(Shard(0), sharding_utils.DTensor)
assert sharding_utils.Shard(1) == Shard(1) and type(sharding_utils.Shard(1)) is Shard
assert sharding_utils.Shard.is_shard is Shard.is_shard
assert sharding_utils._local_shard_size_and_offset(5, 2, 1) == (2, 3)

from transformers import trainer_utils
from transformers.integrations import integration_utils
assert not trainer_utils._is_peft_model("a string")
assert not isinstance("a string", integration_utils.PreTrainedModel)
assert "peft" not in sys.modules

import peft
config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                  num_attention_heads=1)
model = transformers.LlamaForCausalLM(config)
assert isinstance(model, integration_utils.PreTrainedModel) and isinstance(model, transformers.PreTrainedModel)
assert transformers.PreTrainedModel is transformers.modeling_utils.PreTrainedModel
assert not trainer_utils._is_peft_model(model)
assert trainer_utils._is_peft_model(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])))
assert trainer_utils.is_peft_available is transformers.utils.is_peft_available and trainer_utils.is_peft_available()
transformers.Trainer(model, transformers.TrainingArguments("out", use_cpu=True, report_to="none"))
"""


def test_models_and_peft_are_imported_when_they_are_wanted(tmp_path):
    pytest.importorskip("peft")
    ran = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


PEFT_FIRST = """
import peft, sys
assert "trl_jax.cli.transformers_patches" in sys.modules
from transformers import trainer_utils
model = type("Wrapped", (peft.PeftModel,), {"__init__": lambda self: None})()
assert trainer_utils._is_peft_model(model) and not trainer_utils._is_peft_model("a string")
"""


def test_a_script_may_import_peft_before_transformers(tmp_path):
    pytest.importorskip("peft")
    (tmp_path / "script.py").write_text(PEFT_FIRST)
    command = [sys.executable, "-m", "trl_jax", "script.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


REFUSED = """
import sys
from trl_jax.cli import transformers_patches
transformers_patches._Absent.__getattr__ = lambda self, name: 1 / 0
transformers_patches.import_without_models()
assert "transformers.conversion_mapping" not in sys.modules and "torch.distributed.fsdp" not in sys.modules
from transformers.distributed.sharding_utils import DTensor
import torch.distributed.tensor
assert DTensor is torch.distributed.tensor.DTensor
"""


@only_thorough
def test_what_does_not_wait_is_imported_as_ever(tmp_path):
    pytest.importorskip("torch")
    ran = subprocess.run([sys.executable, "-c", REFUSED], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_processor_of_images_and_videos_loads_without_torchvision(tmp_path, monkeypatch):
    auto = pytest.importorskip("transformers.models.auto.video_processing_auto")
    mixin = importlib.import_module("transformers.processing_utils").ProcessorMixin
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("there is a torchvision")
    wanted = tiny_tiled(tmp_path, "qwen3_vl", monkeypatch)
    settings = {"video_processor_type": "Qwen3VLVideoProcessor", "fps": 2}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    monkeypatch.undo()
    for owner, name in (
        (auto.AutoVideoProcessor, "from_pretrained"), (mixin, "check_argument_for_proper_class"), (mixin, "to_dict"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, vars(owner)[name])  # so that it is restored
    load_without_videos(auto)
    accept_no_videos(mixin)
    found = transformers.AutoProcessor.from_pretrained(tmp_path)
    texts, [picture] = {"text": ["see <|image_pad|> and bake"], "return_tensors": "np"}, pictures(1)
    assert found.tokenizer.chat_template == wanted.tokenizer.chat_template
    own, their = (one(images=[picture], **texts) for one in (found, wanted))
    assert own.keys() == their.keys() and all((own[name] == their[name]).all() for name in own)
    assert found.video_processor.fps == 2 and not hasattr(found.video_processor, "nothing")
    with pytest.raises(ImportError, match="Videos are processed by transformers with torchvision"):
        found.video_processor([])
    found.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "processor_config.json").read_text())
    assert saved["video_processor"] == settings


def test_the_processor_of_mistral3_loads_without_torchvision(tmp_path, monkeypatch):
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("there is a torchvision")
    with monkeypatch.context() as patched:
        wanted = built_processor("mistral3", patched)
    wanted.save_pretrained(tmp_path)
    module = importlib.import_module("transformers.models.pixtral")
    monkeypatch.setitem(vars(module), "PixtralProcessor", None)  # so that it is restored
    load_pixtral_processor(module)
    assert "transformers.models.pixtral.image_processing_pixtral" not in sys.modules
    found, [picture] = transformers.AutoProcessor.from_pretrained(tmp_path), pictures(1)
    own, their = (one(images=[picture], text=["see [IMG]"], return_tensors="np") for one in (found, wanted))
    assert own.keys() == their.keys() and all(np.array_equal(own[name], their[name]) for name in own)
