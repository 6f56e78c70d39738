"""The requests that training sends to vLLM, and the replies of a real server, in recorded_vllm.json.

`VLLM=1 RECORD=1 bash compat_tests/run.sh compat_tests/rollout/test_vllm.py -k recorded` records them again.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import peft
from transformers import AutoModelForCausalLM

FILE = Path(__file__).with_name("recorded_vllm.json")
# In requests and recordings, these names stand for the folders of the model and of an adapter of rank 4.
MODEL, ADAPTER = "MODEL", "ADAPTER"
SAMPLED = {
    "model": MODEL, "prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.0,
    "repetition_penalty": 1.1, "stop_token_ids": [1], "ignore_eos": True, "n": 2, "seed": 4, "logprobs": 0,
    "return_token_ids": True,
}  # fmt: skip
LOAD = {"method": "reload_weights", "kwargs": {"weights_path": MODEL}}
# `ignore_eos` makes every completion 3 tokens long. No body: a GET request.
REQUESTS = [
    ("/health", None),
    ("/v1/models", None),
    ("/server_info?config_format=json", None),
    ("/weight_info", None),
    ("/resume", {}),
    ("/v1/completions", {"model": MODEL, "prompt": [300], "max_tokens": 1}),
    ("/v1/completions", {"model": MODEL, "prompt": [70000], "max_tokens": 1}),
    ("/v1/completions", SAMPLED),
    ("/v1/completions", SAMPLED | {"max_tokens": 1000}),
    ("/v1/completions", SAMPLED | {"model": "no such adapter"}),
    ("/pause?mode=wait", {}),
    ("/collective_rpc", LOAD),
    ("/reset_prefix_cache", {}),
    ("/update_weight_version", {"new_version": "run/1"}),
    ("/resume", {}),
    ("/weight_info", None),
    ("/v1/completions", {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 0}),
    ("/v1/load_lora_adapter", {"lora_name": "run/2", "lora_path": ADAPTER}),
    ("/v1/load_lora_adapter", {"lora_name": "run/2", "lora_path": ADAPTER}),
    ("/v1/completions", SAMPLED | {"model": "run/2"}),
    ("/v1/unload_lora_adapter", {"lora_name": "run/2"}),
    ("/v1/unload_lora_adapter", {"lora_name": "run/2"}),
    ("/no_such_path", {}),
]


def replies(url: str, model: str, adapter: str) -> list[dict]:
    """The path, status and reply of each request, with the folders replaced by their names."""
    folders, found = {MODEL: str(model), ADAPTER: str(adapter)}, []
    for path, body in REQUESTS:
        status, reply = _asked(url + path, None if body is None else _named(body, folders))
        if path.startswith("/server_info"):  # the rest describes the machine
            config = reply["vllm_config"]
            lora = {"max_lora_rank": config["lora_config"]["max_lora_rank"]}
            mode = {"logprobs_mode": config["model_config"]["logprobs_mode"]}
            reply = {"vllm_config": {"model_config": mode, "lora_config": lora}}
        reply = _named(reply, {folder: name for name, folder in folders.items()})
        found.append({"path": path, "status": status, "reply": reply})
    return found


def replies_about_an_image(url: str, model: str, image: str, token: int) -> list[dict]:
    """As `replies`, for a prompt with an image (a data URL); `token` is its token."""
    content = [{"type": "image_url", "image_url": {"url": image}}]
    body = {"model": str(model), "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    render, generate = "/v1/chat/completions/render", "/inference/v1/generate"
    status, rendered = _asked(url + render, body)
    features = rendered["features"]
    (place,) = features["mm_placeholders"]["image"]
    given = features | {"mm_placeholders": {"image": [place | {"offset": 1}]}}
    options = {name: value for name, value in SAMPLED.items() if name not in ("model", "prompt", "return_token_ids")}
    body = {"model": str(model), "token_ids": [5, *[token] * place["length"], 6], "features": given}
    answer, written = _asked(url + generate, body | {"sampling_params": options | {"output_kind": 2}})
    features["kwargs_data"] = None  # the image, processed, which goes back as it is
    found = [{"path": render, "status": status, "reply": rendered},
             {"path": generate, "status": answer, "reply": written}]  # fmt: skip
    return _named(found, {str(model): MODEL})


def adapter(model: str, folder: Path) -> Path:
    """An adapter of rank 4 of a model in a folder."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(folder)
    return folder


def _asked(url: str, body: dict | None) -> tuple[int, Any]:
    """The status of a reply and what it says: JSON, text, or None if it is empty."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    try:
        return status, json.loads(text) if text else None
    except ValueError:
        return status, text


def _named(found, names: dict[str, str]):
    """A copy with every occurrence of a name in its texts replaced."""
    text = json.dumps(found)
    for name, other in names.items():
        text = text.replace(name, other)
    return json.loads(text)


def differences(mine, real, where: str = "") -> list[str]:
    """Where `mine` has a key that `real` lacks, a value of another type, or a list of another length.

    Lists of numbers only need the same types: how many tokens a prompt has is up to the model.
    """
    if isinstance(mine, dict) and isinstance(real, dict):
        found = [f"{where}.{name}: only in the stub" for name in mine if name not in real]
        return found + [text for name in mine if name in real
                        for text in differences(mine[name], real[name], f"{where}.{name}")]  # fmt: skip
    if isinstance(mine, list) and isinstance(real, list):
        kinds = [set(map(type, values)) for values in (mine, real)]
        if kinds[0] == kinds[1] and kinds[0] <= {int, float}:
            return []
        if len(mine) == len(real):
            return [text for number, pair in enumerate(zip(mine, real, strict=True))
                    for text in differences(*pair, f"{where}[{number}]")]  # fmt: skip
    return [] if type(mine) is type(real) and not isinstance(mine, list) else [f"{where}: {mine!r}, not {real!r}"]
