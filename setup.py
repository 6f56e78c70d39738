"""What pyproject.toml cannot say: the examples are packaged, and the README's links are absolute on a package index."""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithExamples(build_py):
    """Also copies examples/ to trl_jax/examples of a wheel. An editable installation has them in the repository."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            skipped = shutil.ignore_patterns("__pycache__", "*.sh", ".*")
            shutil.copytree(
                ROOT / "examples", Path(self.build_lib, "trl_jax/examples"), ignore=skipped, dirs_exist_ok=True
            )


def readme() -> str:
    """README.md; its links to files are links to [project.urls] Repository, where pyproject.toml has one."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository")
    return text if repository is None else with_absolute_links(text, repository)


def with_absolute_links(text: str, repository: str) -> str:
    """Markdown whose links to files of the repository lead to its GitHub pages, and pictures to their bytes."""
    url = repository.rstrip("/")

    def absolute(link: re.Match) -> str:
        view = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({url}/{view}/main/{link['path']})"

    return re.sub(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<path>(?!https?:|#|mailto:)[^)\s]+)\)", absolute, text)


if __name__ == "__main__":
    setup(
        cmdclass={"build_py": BuildWithExamples},
        long_description=readme(),
        long_description_content_type="text/markdown",
    )
