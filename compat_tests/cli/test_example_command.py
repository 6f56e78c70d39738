"""`trl-jax example`, what setup.py packages, and the Dockerfiles."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from compat_tests import pages
from trl_jax.cli.main import main
from trl_jax.scripts import example

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_example_is_listed_and_named_in_one_line(capsys):
    assert main(["example"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.split("\n\n")[0].splitlines()]
    files = {path.stem for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".ipynb")}
    assert set(listed) == files - set(example._HELPERS) and len(listed) > 10


def test_an_example_comes_with_the_files_that_it_needs(capsys):
    assert main(["example", "quickstart.py"]) == 0
    copied = {str(path.relative_to(Path.cwd())) for path in Path.cwd().rglob("*") if path.is_file()}
    data = {f"data/{path.name}" for path in (ROOT / "examples" / "data").iterdir()}
    assert copied == {"quickstart.py", "tiny_model.py", "plot.py"} | data
    assert Path("quickstart.py").read_bytes() == (ROOT / "examples" / "quickstart.py").read_bytes()
    assert "Next: python quickstart.py" in capsys.readouterr().out
    assert main(["example", "quickstart"]) == 0, "the same files may be there"


def test_a_file_of_the_user_is_kept(capsys):
    Path("capitals.py").write_text("mine")
    assert main(["example", "sft"]) == 2
    assert "capitals.py is already here, with other content" in capsys.readouterr().err
    assert [path.name for path in Path.cwd().iterdir()] == ["capitals.py"] and Path("capitals.py").read_text() == "mine"


def test_a_wrong_name_is_answered_with_the_closest(capsys):
    assert main(["example", "quikstart"]) == 2
    assert "There is no example 'quikstart'; did you mean quickstart?" in capsys.readouterr().err


def test_a_wheel_has_the_examples(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "build_py", "-d", tmp_path / "lib"]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, capture_output=True)
    packaged = {path.relative_to(tmp_path / "lib" / "trl_jax" / "examples") for path in tmp_path.rglob("examples/**/*")}
    wanted = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".ipynb", ".jsonl")]
    assert {path.relative_to(ROOT / "examples") for path in wanted} <= packaged
    assert (tmp_path / "lib" / "trl_jax" / "scripts" / "example.py").is_file()


def test_links_of_the_readme_are_absolute_on_a_package_index():
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    text = setup.with_absolute_links(pages.read(pages.README), "https://github.com/OWNER/trl_jax/")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) >= 30 and all(link.startswith(("https://", "#")) for link in links)
    assert "(https://github.com/OWNER/trl_jax/blob/main/docs/pages/porting.md)" in text
    assert "](https://github.com/OWNER/trl_jax/raw/main/docs/pages/images/shared_prompt.svg)" in text
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    assert ("](docs/" in setup.readme()) == ("Repository" not in urls)


@pytest.mark.parametrize("kind", ["cuda", "tpu"])
def test_dockerfiles_install_as_the_pages_say(kind):
    text = (ROOT / "docker" / f"{kind}.Dockerfile").read_text()
    assert f'pip install --no-cache-dir "/trl_jax[{kind}]"' in text
    for page in (pages.README, pages.FOLDER / "getting-started.md"):
        assert f'pip install ".[{kind}]"' in pages.read(page)
    build, run = re.findall(r"^#   (docker .*)$", text, flags=re.M)
    assert {build, run} <= set(pages.read(pages.FOLDER / "getting-started.md").replace("\\\n    ", "").splitlines())
    base = re.search(r"^FROM python:(3\.\d+)-slim$", text, flags=re.M)[1]
    assert base in pages.read(pages.README), "a Python that is supported"


def test_a_reader_that_stops_early_sees_no_error():
    command = [sys.executable, "-m", "trl_jax.cli.main", "example"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        run.stdout.close()
        assert run.stderr.read() == "" and run.wait() == 141
