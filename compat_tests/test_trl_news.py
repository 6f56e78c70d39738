"""What trl_news reports about two releases."""

import re
import tomllib

import pytest

from compat_tests.trl_news import news, read

OLD = """
class AConfig:
    beta: float = field(default=0.1, metadata={"help": "old words"})
    gone: int = 1
class ATrainer:
    def train(self): ...
"""
NEW = """
class AConfig:
    beta: float = field(default=0.2, metadata={"help": "new words"})
    covered: int = 3
    uncovered: list = field(default_factory=list)
class ATrainer:
    def train(self): ...
    def fresh(self): ...
def helper(): ...
"""
OURS = """
class Base:
    covered: int = 3
class AConfig(config.Base):
    beta: float = 0.2
"""


def _package(folder, text):
    folder.mkdir()
    (folder / "a.py").write_text(text)
    return read(folder)


def test_differences_are_listed_and_gaps_are_marked(tmp_path):
    old, new, ours = (_package(tmp_path / n, t) for n, t in [("old", OLD), ("new", NEW), ("ours", OURS)])
    assert news(old, new, ours) == [
        "name + helper  MISSING",
        "AConfig.covered + 3",
        "AConfig.uncovered + list  MISSING",
        "AConfig.gone -",
        "AConfig.beta: 0.1 -> 0.2",
        "ATrainer.fresh() +  MISSING",
    ]
    assert news(new, new, ours) == []


def test_a_folder_without_source_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="unpacked package"):
        read(tmp_path)


def test_the_page_of_releases_has_the_versions_of_pyproject():
    from compat_tests import pages

    page = pages.read(pages.FOLDER / "releases.md")
    [table] = pages.tables(page)
    rows = {row["what"]: row["supported"] for row in table}
    project = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]
    wanted = {dependency.split(">=")[0]: dependency.split(">=")[-1] for dependency in project["dependencies"]}
    first, end = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups()
    assert rows["Python"] == ", ".join(f"3.{minor}" for minor in range(int(first), int(end)))
    [reference] = [name for name in project["optional-dependencies"]["test"] if name.startswith("trl==")]
    assert rows["TRL"].startswith(f"the API of {reference.removeprefix('trl==')};")
    low, high = wanted["transformers"].split(",<")
    assert rows["transformers"] == f"{low} to {int(high) - 1}.x"
    assert rows["JAX"] == f"{wanted['jax']} and later"
