"""Each case is trained once per session with TRL and PEFT, and once with us."""

from __future__ import annotations

import pytest

from compat_tests.hub.peft.runs import CASES, checkpoint, train


class Runs:
    def __init__(self, new_folder):
        self._new_folder, self._models, self._done = new_folder, {}, {}

    def model(self, name: str):
        if name not in self._models:
            self._models[name] = checkpoint(name, self._new_folder(name) / "model")
        return self._models[name]

    def ours(self, name: str):
        import trl_jax

        return self._run(trl_jax, trl_jax.LoraConfig, name)

    def theirs(self, name: str):
        import peft
        import torch
        import trl

        torch.set_num_threads(1)
        return self._run(trl, peft.LoraConfig, name)

    def _run(self, package, kind, name):
        key = package.__name__, name
        if key not in self._done:
            out = self._new_folder("-".join(key))
            self._done[key] = train(package, (kind, CASES[name]), self.model(name), out)
        return self._done[key]


@pytest.fixture(scope="session")
def adapted(tmp_path_factory):
    pytest.importorskip("trl", reason="parity is measured against real TRL")
    pytest.importorskip("peft", reason="and PEFT")
    return Runs(tmp_path_factory.mktemp)
