"""What trl_news reports of two releases."""

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
