"""The workflow that publishes a release."""

from __future__ import annotations

import yaml

from compat_tests.pages import ROOT

WORKFLOWS = ROOT / ".github" / "workflows"


def test_a_release_is_published_after_all_checks_and_a_trial_of_the_wheel():
    jobs = yaml.safe_load((WORKFLOWS / "release.yml").read_text())["jobs"]
    needed = [jobs[name] for name in jobs["publish"]["needs"]]
    [called] = [ROOT / job["uses"] for job in needed if "uses" in job]
    commands = [step.get("run") for job in yaml.safe_load(called.read_text())["jobs"].values() for step in job["steps"]]
    commands += [step.get("run") for job in needed for step in job.get("steps", [])]
    assert {"bash .ci/run", ".ci/wheel dist/*.whl"} <= set(commands)
