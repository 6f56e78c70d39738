"""A Hub on the loopback interface: a standard-library HTTP server for the real huggingface_hub client.

It supports whoami, creating repositories and branches, preupload, git-LFS uploads, commits, listings and downloads, but
not Xet, which is disabled in the client.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from huggingface_hub import constants

TOKEN, USER = "hf_the_only_good_token_there_is", "somebody"


@dataclass
class Repository:
    """branch -> [(commit message, path -> content)], oldest first."""

    private: bool
    branches: dict[str, list[tuple[str, dict[str, bytes]]]]


@dataclass
class Hub:
    """The server's state, and the faults that it injects.

    Attributes:
        fault: called with (method, path) before each answer. A number is the status to answer with, "drop" closes the
            connection, "slow" waits half a second, "hang" waits a minute, "zeros" sends zeros for a file's bytes and
            "half" only half of them. None answers normally.
        headers: sent with every faulty answer.
        requests: (method, path) of all requests.
        received: the same with query, headers except Authorization, and body.
        token: the token with all permissions.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)
    token: str = TOKEN
    fault: Any = lambda method, path: None
    headers: dict[str, str] = field(default_factory=dict)
    closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self.server.daemon_threads, self.server.hub = True, self
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()

    def messages(self, name: str, branch: str = "main") -> list[str]:
        return [message for message, _ in self.repositories[name].branches[branch]]

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        return self.repositories[name].branches[branch][-1][1]

    def commit(self, name: str, branch: str, lines: list[dict]) -> str:
        history = self.repositories[name].branches[branch]
        tree, message = dict(history[-1][1]), ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                tree[value["path"]] = self.objects[value["oid"]]
            else:
                raise AssertionError(line["key"])
        history.append((message, tree))
        return _oid(history)


@contextmanager
def serving(monkeypatch, cache: Path | None = None):
    """Serve a Hub that this process's client uses, with downloads cached in `cache`."""
    server = Hub()
    settings = {"ENDPOINT": server.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    settings["HUGGINGFACE_CO_URL_TEMPLATE"] = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    settings |= {} if cache is None else {"HF_HUB_CACHE": str(cache)}
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    try:
        yield server
    finally:
        server.close()


def _oid(history) -> str:
    return hashlib.sha1(repr([message for message, _ in history]).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *given):
        pass

    def do_POST(self):
        self._answer("POST")

    def do_GET(self):
        self._answer("GET")

    def do_PUT(self):
        self._answer("PUT")

    def do_HEAD(self):
        self._answer("HEAD")

    def _answer(self, method: str) -> None:
        self.hub, path = self.server.hub, unquote(urlparse(self.path).path)
        self.hub.requests.append((method, path))
        fault = self.hub.fault(method, path)
        headers = [f"{name}: {value}" for name, value in self.headers.items() if name.lower() != "authorization"]
        self.hub.received.append("\n".join([method, self.path, *headers, ""]).encode())
        if fault == "drop":
            self.close_connection = True
            self.connection.close()
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.received[-1] += body
        self.spoiled = fault
        if fault == "hang":
            self.hub.closed.wait(60)
            self.close_connection = True
            return
        if fault == "slow":
            time.sleep(0.5)
        elif fault not in (None, "zeros", "half"):
            self._send(fault, {"error": f"the server says {fault}"}, self.hub.headers)
            return
        if not path.startswith("/objects/") and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._send(401, {"error": "Invalid username or password."})
            return
        for pattern, answer in _ROUTES:
            if found := re.fullmatch(pattern, f"{method} {path}"):
                if found.groupdict().get("name", USER) not in (USER, *self.hub.repositories):
                    self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
                    return
                answer(self, body, **found.groupdict())
                return
        self._send(404, {"error": f"{method} {path} is not known here"})

    def _send(self, status: int, content: Any, headers: dict | None = None, half: bool = False) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "X-Request-Id": "1", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if half else data)
        self.close_connection = half or self.close_connection

    def whoami(self, body):
        self._send(200, {"name": USER, "type": "user", "auth": {"accessToken": {"role": "write"}}})

    def create(self, body):
        asked = json.loads(body)
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        there = name in self.hub.repositories
        new = Repository(private, {"main": [("initial commit", {".gitattributes": b""})]})
        self.hub.repositories.setdefault(name, new)
        self._send(409 if there else 200, {"url": f"{self.hub.url}/{name}", "name": name})

    def branch(self, body, name, branch):
        branches = self.hub.repositories[name].branches
        there = branch in branches
        branches.setdefault(branch, list(branches["main"]))
        self._send(409 if there else 200, {})

    def preupload(self, body, name, branch):
        if branch not in self.hub.repositories[name].branches:
            self._send(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
            return
        large = (".safetensors", ".bin", "tokenizer.json")
        paths = [file["path"] for file in json.loads(body)["files"]]
        modes = {path: "lfs" if path.endswith(large) else "regular" for path in paths}
        files = [{"path": path, "shouldIgnore": False, "uploadMode": mode} for path, mode in modes.items()]
        self._send(200, {"files": files})

    def lfs(self, body, name):
        objects = []
        for entry in json.loads(body)["objects"]:
            href = f"{self.hub.url}/objects/{entry['oid']}"
            actions = {} if entry["oid"] in self.hub.objects else {"actions": {"upload": {"href": href}}}
            objects.append({"oid": entry["oid"], "size": entry["size"], **actions})
        self._send(200, {"transfer": "basic", "objects": objects})

    def put(self, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            self._send(400, {"error": "not what was announced"})
            return
        self.hub.objects[oid] = body
        self._send(200, {})

    def commit(self, body, name, branch):
        oid = self.hub.commit(name, branch, [json.loads(line) for line in body.splitlines()])
        self._send(200, {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"})

    def validate(self, body):
        self._send(200, {"errors": [], "warnings": []})

    def info(self, body, name, branch="main"):
        history = self.hub.repositories[name].branches[branch]
        siblings = [{"rfilename": path} for path in history[-1][1]]
        self._send(200, {"_id": "1", "id": name, "sha": _oid(history), "siblings": siblings, "tags": []})

    def _history(self, name, branch):
        """`branch` may also be a commit id."""
        branches = self.hub.repositories[name].branches
        return branches.get(branch) or next(history for history in branches.values() if _oid(history) == branch)

    def tree(self, body, name, branch):
        files = self._history(name, branch)[-1][1].items()
        entries = [{"type": "file", "path": p, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for p, d in files]
        self._send(200, entries)

    def resolve(self, body, name, branch, path):
        history = self._history(name, branch)
        data = history[-1][1].get(path)
        if data is None:
            self._send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        digest = (hashlib.sha256 if path.endswith(".safetensors") else hashlib.sha1)(data).hexdigest()
        sent = bytes(len(data)) if self.spoiled == "zeros" else data
        self._send(200, sent, {"ETag": f'"{digest}"', "X-Repo-Commit": _oid(history)}, half=self.spoiled == "half")


_NAME, _BRANCH = r"(?P<name>[^/]+/[^/]+)", r"(?P<branch>[^/]+)"
_ROUTES = [
    (r"GET /api/whoami-v2", _Handler.whoami),
    (r"POST /api/repos/create", _Handler.create),
    (r"POST /api/validate-yaml", _Handler.validate),
    (rf"POST /api/models/{_NAME}/branch/{_BRANCH}", _Handler.branch),
    (rf"POST /api/models/{_NAME}/preupload/{_BRANCH}", _Handler.preupload),
    (rf"POST /api/models/{_NAME}/commit/{_BRANCH}", _Handler.commit),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", _Handler.lfs),
    (r"PUT /objects/(?P<oid>[0-9a-f]+)", _Handler.put),
    (rf"GET /api/models/{_NAME}", _Handler.info),
    (rf"GET /api/models/{_NAME}/revision/{_BRANCH}", _Handler.info),
    (rf"GET /api/models/{_NAME}/tree/{_BRANCH}", _Handler.tree),
    (rf"(?:GET|HEAD) /{_NAME}/resolve/{_BRANCH}/(?P<path>.+)", _Handler.resolve),
]
