"""Runs are expensive: each case is trained once per session with us, and with TRL if it is not recorded."""

from __future__ import annotations

import warnings

import pytest

from compat_tests.parity import golden, reference
from compat_tests.parity.cases import CASES
from compat_tests.tiny import preference_rows


class Runs:
    """The runs of the cases, by name. `theirs` and `ours` are cached; `ours_afresh` trains again, for mutants."""

    def __init__(self, checkpoint, new_folder):
        self._checkpoint, self._new_folder = checkpoint, new_folder
        self._theirs, self._ours = {}, {}

    def theirs(self, name: str) -> reference.Run:
        if name not in self._theirs:
            self._theirs[name] = self._train(golden.run_trl, name, f"reward/{name}", model=CASES[name].model)
        return self._theirs[name]

    def ours(self, name: str) -> reference.Run:
        if name not in self._ours:
            self._ours[name] = self.ours_afresh(name)
        return self._ours[name]

    def ours_afresh(self, name: str, **config) -> reference.Run:
        """`config` overrides the case's."""
        return self._train(reference.run_ours, name, **config)

    def folder(self, name: str):
        """The checkpoint a case starts from."""
        return self._checkpoint(**CASES[name].model)

    def _train(self, run, name: str, *called, **config) -> reference.Run:
        case = CASES[name]
        eval_rows = None if case.eval_rows is None else preference_rows(**case.eval_rows)
        out = self._new_folder.mktemp(name)
        given = preference_rows(**case.rows), out
        return run(*called, self.folder(name), *given, eval_rows=eval_rows, **case.config | config)


@pytest.fixture(scope="session")
def runs(checkpoint, tmp_path_factory) -> Runs:
    return Runs(checkpoint, tmp_path_factory)


@pytest.fixture(scope="module")
def both_of(checkpoint, tmp_path_factory):
    """both_of(trainer, cases, rows) -> a function from the name of a case to (our run, TRL's run).

    trainer: "SFT", "DPO" or another prefix of trl's class names; rows: makes rows from the options of a case.
    """

    def runs_of(trainer, cases, rows):
        done = {}

        def run(name):
            if name not in done:
                case, folder = cases[name], checkpoint(**cases[name].model)
                eval_rows = None if case.eval_rows is None else rows(**case.eval_rows)
                options = {"trainer": trainer, "eval_rows": eval_rows} | case.config
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # about what TRL's next release removes
                    outs, given = (tmp_path_factory.mktemp(name) for _ in range(2)), (folder, rows(**case.rows))
                    called = f"{trainer.lower()}/{name}"
                    done[name] = (
                        reference.run_ours(*given, next(outs), **options),
                        golden.run_trl(called, *given, next(outs), model=case.model, **options),
                    )
            return done[name]

        return run

    return runs_of
