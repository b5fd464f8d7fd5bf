"""What reaches a user: a wheel and an sdist that work anywhere, extras that can be missing, completion, versions."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib.metadata import Distribution, distribution, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.main import get_command

import confide
from confide import errors
from confide.cli import app
from confide.commands.options import recipe_names
from confide.errors import UserError

Command = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# A name that is None in sys.modules cannot be imported, as if it were not installed.
WITHOUT = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"


def python(code: str, site: Path | None, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    if site is not None:
        env["PYTHONPATH"] = str(site)
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def confide_without(modules: tuple[str, ...], words: list[str], site: Path | None, cwd: Path) -> tuple[int, str, str]:
    code = WITHOUT.format(names=modules) + f"sys.argv = ['confide', *{words!r}]\nfrom confide.cli import main\nmain()"
    done = python(code, site, cwd)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, which is built from a copy of the checkout: what is missing from either is missing here."""
    pytest.importorskip("setuptools", reason="setuptools builds the wheel and is not installed")
    place = tmp_path_factory.mktemp("build")
    copy = place / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), str(copy)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return next(place.glob("*.whl"))


def needed(requirements: list[str], found: dict[str, Distribution] | None = None) -> dict[str, Distribution]:
    """What some requirements bring, with what that needs in turn, as it is installed here; no extras of ours."""
    found = {} if found is None else found
    for text in requirements:
        wanted = Requirement(text)
        name = canonicalize_name(wanted.name)
        holds = wanted.marker is None or any(wanted.marker.evaluate({"extra": e}) for e in ("", *wanted.extras))
        if holds and name not in found:
            found[name] = distribution(wanted.name)
            own = [line for line in found[name].requires or [] if "extra ==" not in line]
            needed(own, found)
    return found


@pytest.fixture(scope="module")
def empty(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in an environment that holds nothing but what the wheel says that it needs; the folder of programs.

    Packages are linked from this environment, since a fresh torch alone would take longer than all of these tests.
    """
    place = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, timeout=300)
    (site,) = place.glob("lib/python*/site-packages")
    for each in needed(PROJECT["dependencies"]).values():
        root = Path(str(each.locate_file("")))
        for name in {file.parts[0] for file in each.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / name).exists():
                (site / name).symlink_to(root / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(place / "bin" / "python")]
    for words in (["install", "--no-index", "--no-deps", str(wheel)], ["check"]):
        done = subprocess.run([*pip, *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    return place / "bin"


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel installed where nothing else is."""
    place = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, "--target", str(place), str(wheel)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return place


# The wheel


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("confide/")}
    source = ROOT / "src"
    wanted = {
        str(path.relative_to(source))
        for path in (source / "confide").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == wanted
    assert len([name for name in packed if name.endswith(".yaml")]) > 20
    assert {"confide/py.typed", "confide/report/assets/page.css", "confide/report/assets/page.js"} <= packed
    assert {"confide/kernels/head.cpp", "confide/kernels/low_rank.cpp"} <= packed


@pytest.mark.slow
def test_the_wheel_holds_no_runner_of_other_systems_and_no_helper_of_tests(wheel: Path) -> None:
    packed = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in packed} == {"confide", f"confide-{PROJECT['version']}.dist-info"}
    helpers = {
        path.stem for folder in ("peers", "support") for path in (ROOT / "benchmarks" / folder).glob("[a-z]*.py")
    }
    assert {"floors", "pfl_runner", "trials", "loopback"} <= helpers
    assert helpers.isdisjoint(Path(name).stem for name in packed)


@pytest.mark.slow
def test_an_installed_bench_measures_this_project_and_says_where_the_others_are(site: Path, tmp_path: Path) -> None:
    words = ["bench", "C", "--rounds", "1", "--warm-up", "0", "--parameters", "3000", "--out", "out"]
    code, out, err = confide_without((), words, site, tmp_path)
    assert code == 0, err
    assert "only confide itself can be run" in err
    rows = [line for line in out.splitlines() if line.startswith(("confide ", "pfl ", "flower ", "one subtraction"))]
    assert len(rows) == 8
    assert all(("benchmarks/peers of the source tree" in row) != row.startswith("confide ") for row in rows)


@pytest.mark.slow
def test_the_installed_wheel_trains_a_shipped_recipe_without_any_extra(site: Path, tmp_path: Path) -> None:
    everything = tuple(name for names in errors.MODULES.values() for name in names)
    words = ["train", "convex/digits", "--out", "run", "--set", "run={steps: 2}", "--set", "evaluation={every: 2}"]
    code, out, err = confide_without(everything, words, site, tmp_path)
    assert code == 0, err
    assert "epsilon" in out
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert not list((tmp_path / "run").glob("events*"))


@pytest.mark.slow
def test_the_wheel_works_where_there_is_nothing_but_what_it_says_it_needs(empty: Path, tmp_path: Path) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([*words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout, done.stderr

    gone = [name for names in errors.MODULES.values() for name in names]
    look = f"import importlib.util as u; print([n for n in {gone!r} if u.find_spec(n)])"
    assert run(str(empty / "python"), "-c", look)[1].strip() == "[]"  # truly without any extra
    train = ["train", "convex/digits", "--out", "run", "--set", "run.steps=5", "--set", "privacy.source=system"]
    for words in (train, ["guarantee", "run"], ["publish", "run", "public"]):
        code, _, err = run(str(empty / "confide"), *words)
        assert code == 0, err
    code, _, err = run(str(empty / "confide"), "export", "public", "--out", "model.onnx")
    assert (code, err.strip()) == (
        2, "writing ONNX needs onnx, onnxscript and onnxruntime, which are not installed; run `pip install "
        "'confide[export]'`",
    )  # fmt: skip


@pytest.mark.slow
def test_the_installed_package_is_the_one_that_runs(site: Path, tmp_path: Path) -> None:
    done = python("import confide; print(confide.__file__)", site, tmp_path)
    assert done.stdout.startswith(str(site))


# Extras


def test_the_extras_bring_the_modules_that_are_asked_for_in_their_name() -> None:
    declared = PROJECT["optional-dependencies"]
    packages = {"faiss": "faiss-cpu", "espeakng_loader": "espeakng-loader", "mlflow": "mlflow-skinny"}
    for extra, modules in errors.MODULES.items():
        names = {re.split(r"[<>=]", line)[0] for line in declared[extra]}
        assert {packages.get(module, module) for module in modules} <= names
    core = {re.split(r"[<>=]", line)[0] for line in PROJECT["dependencies"]}
    assert core.isdisjoint({"soundfile", "soxr", "jiwer", "transformers", "faiss-cpu", "matplotlib", "tensorboard"})


def test_every_extra_that_a_text_names_is_declared_and_every_declared_one_is_named_where_it_is_missing() -> None:
    declared, named = set(PROJECT["optional-dependencies"]), set(errors.MODULES)
    for path in (ROOT / "src").rglob("*.py"):
        named |= {extra for found in re.findall(r"confide\[([\w,]+)\]", path.read_text()) for extra in found.split(",")}
    assert named <= declared
    assert declared - named == {"dev", "docs", "ui"}  # for people who work on it, and one that joins two others


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["train", "speech/embedded/federated", "--out", "run"], "speech"),
        (["corpus", "stats", "synthetic"], "speech"),
        (["train", "retrieval/sms-head", "--out", "run"], "retrieval"),
        (["reproduce", "norm/quadratics", "--out", "run"], "figures"),
    ],
)
def test_a_missing_extra_is_named_with_the_line_that_mends_it(words: list[str], extra: str, tmp_path: Path) -> None:
    code, out, err = confide_without(errors.MODULES[extra], words, None, tmp_path)
    assert (code, out) == (2, "")
    assert f"pip install 'confide[{extra}]'" in err
    assert "Traceback" not in err
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_what_is_missing_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs soundfile, soxr, espeakng_loader, jiwer and unidecode, which are not"):
        errors.require("speech", "speech recognition")
    assert errors.explained(ModuleNotFoundError(name="nothing.known")) is None


def test_the_setup_and_the_readme_install_what_demo_and_tests_need() -> None:
    found = re.search(r"-e '\.\[(.*?)\]'", (ROOT / "Makefile").read_text())
    assert found is not None
    apart = {"flower", "wandb", "mlflow"}  # tried in environments of their own
    assert {"dev", *errors.MODULES} - apart <= set(found[1].split(","))
    readme = (ROOT / "README.md").read_text()
    assert "confide[speech]" in readme
    assert [extra for extra in PROJECT["optional-dependencies"] if f"`{extra}`" not in readme] == ["dev", "docs"]


# Containers


def test_the_container_of_the_demo_copies_what_is_there_and_runs_commands_that_exist() -> None:
    """There is no container engine where tests run, so each line is held against what it refers to."""
    text = (ROOT / "containers" / "demo.Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.partition(" ")[::2] for line in text.splitlines() if line and not line.startswith("#")]
    for words in (rest.split() for kind, rest in lines if kind == "COPY"):
        assert all((ROOT / name).exists() for name in words[:-1])
    assert {"src", "pyproject.toml", "constraints.txt"} <= {
        w for kind, rest in lines if kind == "COPY" for w in rest.split()
    }
    extras = {extra for found in re.findall(r"\.\[([\w,]+)\]", text) for extra in found.split(",")}
    assert {"speech", "retrieval"} <= extras <= set(PROJECT["optional-dependencies"])
    commands = [part for kind, rest in lines if kind in ("RUN", "CMD") for part in rest.split("&&")]
    ours = [
        shlex.split(part.strip().removeprefix("exec ")) for part in commands if "confide " in part.partition("-c")[0]
    ]
    called = [words[1:] for words in ours if words[0] == "confide"]
    assert [words[0] for words in called] == ["encoder", "demo", "ui"]
    for words in called:
        command: Any = get_command(app)
        context = command.make_context("confide", ["recipe"], resilient_parsing=True)
        while hasattr(command, "commands"):
            name, command, words = command.resolve_command(context, words)
            context = context.__class__(command, info_name=name, parent=context)
        command.make_context(name, list(words))  # refuses options that do not exist
    port = re.search(r"--port (\d+)", text)
    assert port is not None
    assert f"EXPOSE {port[1]}" in text
    assert f"127.0.0.1:{port[1]}:{port[1]}" in text  # published to this machine alone


# Versions, completion, import


def test_the_version_says_which_accountant_vouches(command: Command) -> None:
    code, out, _ = command("--version")
    assert code == 0
    assert out.startswith(f"confide {confide.__version__} (dp-accounting {version('dp-accounting')}, torch ")
    assert PROJECT["version"] == confide.__version__


def test_help_still_opens_with_what_to_do(command: Command) -> None:
    code, out, _ = command("--help")
    assert code == 0
    assert "Start here" in out
    assert "--install-completion" in out


def test_the_shell_offers_recipes_and_commands() -> None:
    assert recipe_names("convex/d") == ["convex/digits"]
    code = "import sys; sys.argv = ['confide']\nfrom confide.cli import main\nmain()"
    typed = {"_CONFIDE_COMPLETE": "complete_bash", "COMP_WORDS": "confide train convex/", "COMP_CWORD": "2"}
    done = python(code, ROOT / "src", ROOT, **typed)
    assert "convex/digits" in done.stdout.split()


def test_importing_the_package_brings_nothing_of_others(tmp_path: Path) -> None:
    code = "import sys\nbefore = set(sys.modules)\nimport confide\nprint(*set(sys.modules) - before)"
    brought = {name.split(".")[0] for name in python(code, ROOT / "src", tmp_path).stdout.split()}
    assert "confide" in brought
    assert brought - {"confide"} <= sys.stdlib_module_names
