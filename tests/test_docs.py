"""Claims about the documents: every command and snippet works, every link leads somewhere.

Blocks under one heading are run in order, in one empty folder; a section that names a run or a file which an earlier
section makes is run after that one, and any other section is a test of its own. A block that takes long, or that needs
what not everyone has, is preceded by `<!-- not run: reason -->`; then its commands, options, recipes and values are
checked, but nothing is trained. After `<!-- needs: minilm, sms_spam -->` a block is run where that encoder and that
folder of the data are there, and checked in the same way elsewhere. A block of YAML is a recipe; `<!-- file: name.yaml
-->` before any block keeps it for the blocks after it. `<!-- printed: as it stands -->` before a block of text says
that the commands before it printed each of its lines; with `numbers vary` their numbers may be others.
"""

from __future__ import annotations

import html
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from confide import recipe
from confide.cli import app
from confide.errors import UserError

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>not run|needs|file|printed): (?P<said>.+?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"(?<!`)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
SECTION = re.compile(r"^(?=## )", re.MULTILINE)
MADE = re.compile(r"(?:--out|confide publish \S+) (\S+)")
# Tutorials that train for long.
SLOW = {"docs/tutorial-retrieval.md: With a guarantee", "docs/tutorial-speech.md: The seed"}
Command = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class Block:
    language: str
    body: str
    mark: str
    said: str


def blocks(text: str) -> Iterator[Block]:
    for found in FENCE.finditer(text):
        body = re.sub(f"^{found['indent']}", "", found["body"], flags=re.MULTILINE)
        yield Block(found["language"], body, found["mark"] or "", found["said"] or "")


@dataclass(frozen=True)
class Story:
    """The blocks of those sections of a page that build on each other, in their order."""

    page: Path
    heading: str
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.heading}"


def stories(page: Path) -> list[Story]:
    """A page in parts that can be run apart from each other."""
    found: list[Story] = []
    for section in SECTION.split(page.read_text()):
        heading, own = section.partition("\n")[0].lstrip("# "), tuple(blocks(section))
        earlier = [story for story in found if uses(own, story.blocks)]
        found = [story for story in found if story not in earlier]
        joined = tuple(block for story in earlier for block in story.blocks)
        found.append(Story(page, earlier[0].heading if earlier else heading, joined + own))
    return [story for story in found if story.blocks]


def uses(later: tuple[Block, ...], earlier: tuple[Block, ...]) -> bool:
    """Whether blocks or their shipped recipes name a folder that others give to `--out`, or a file that they keep."""
    made = {word for block in earlier for word in MADE.findall(block.body)}
    made |= {block.said for block in earlier if block.mark == "file"}
    made |= {f"{name.removesuffix('.py')}:" for name in made if name.endswith(".py")}
    text = "".join(block.body for block in later)
    text += "".join(path.read_text() for name, path in recipe.shipped().items() if re.search(rf"{name}\b", text))
    return any(name in text for name in made)


def commands(body: str) -> Iterator[list[str]]:
    """The words of each command, without comments and the place where the environment's programs lie."""
    for line in body.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


def checked(words: list[str]) -> None:
    """The command is there with these options, and a recipe with these values."""
    context: Any = get_command(app).make_context("confide", list(words[1:]))
    while hasattr(context.command, "resolve_command"):  # a group, whichever copy of click typer brings
        name, inner, rest = context.command.resolve_command(context, context._protected_args + context.args)
        context = inner.make_context(name, rest, parent=context)
    if words[1] in ("train", "audit"):
        recipe.load(context.params["recipe"], context.params.get("set_") or [])


def shape(line: str, said: str) -> str:
    """A line without what may differ between runs."""
    assert said in ("as it stands", "numbers vary")
    return " ".join((re.sub(r"\d[\d,.]*(e-?\d+)?", "0", line) if said == "numbers vary" else line).split())


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


STORIES = [
    pytest.param(story, id=story.name, marks=[pytest.mark.slow] if story.name in SLOW else [])
    for page in PAGES
    for story in stories(page)
]


def test_a_page_is_cut_where_nothing_before_is_needed(tmp_path: Path) -> None:
    fence = "```"
    page = tmp_path / "page.md"
    parts = [
        f"# Title\n{fence}bash\nconfide train convex/digits --out runs/a\n{fence}\n",
        f"## Apart\n<!-- file: rules.py -->\n{fence}python\nx = 1\n{fence}\n",
        f"## On the first\n{fence}bash\nconfide ledger runs/a\n{fence}\n",
        "## Only words\n",
        f"## On the second\n{fence}bash\nconfide audit convex/digits --set rule=rules:soft\n{fence}\n",
    ]
    page.write_text("".join(parts))
    found = [(story.heading, len(story.blocks)) for story in stories(page)]
    assert found == [("Title", 2), ("Apart", 2)]


def test_no_block_of_a_page_is_left_out_of_its_parts() -> None:
    for page in PAGES:
        parts = [block for story in stories(page) for block in story.blocks]
        assert sorted(map(repr, parts)) == sorted(map(repr, blocks(page.read_text()))), page
    assert {param.id for param in STORIES} >= SLOW
    assert any(len(stories(page)) > 2 for page in PAGES)


@pytest.mark.parametrize("story", STORIES)
def test_every_block_of_a_page_works(
    story: Story,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    missing: Callable[[str], str | None],
) -> None:
    monkeypatch.setenv("CONFIDE_DATA", str(Path(os.environ.get("CONFIDE_DATA", "../shared/data")).resolve()))
    monkeypatch.chdir(tmp_path)
    absent: list[str] = []
    shown: list[str] | None = None  # by the last block of commands; none where it was not run
    for block in story.blocks:  # a page may show a file behind the commands that read it
        if block.mark == "file":
            (tmp_path / block.said).write_text(block.body)
    for block in story.blocks:
        lacks = [why for why in map(missing, block.said.split(", ")) if why] if block.mark == "needs" else []
        absent += lacks
        runs = block.mark != "not run" and not lacks
        if block.mark == "file":
            (tmp_path / block.said).write_text(block.body)
        if block.language == "python" and runs:
            exec(compile(block.body, f"{story.name}: {block.body[:40]!r}", "exec"), {"__name__": "__main__"})
        elif block.language == "yaml":
            (tmp_path / "block.yaml").write_text(block.body)
            recipe.load("block.yaml", [])
        elif block.mark == "printed" and shown is not None:
            printed = {shape(line, block.said) for text in shown for line in text.splitlines()}
            for line in block.body.splitlines():
                assert shape(line, block.said) in printed, "\n".join([f"nothing printed {line!r}", *shown])
        elif block.language == "bash":
            shown = [] if runs else None
            for words in commands(block.body):
                if words[0] == "make":
                    assert set(words[1:]) <= make_targets(), words
                elif words[0] != "confide":
                    assert block.mark == "not run", f"{words} cannot be run here; say why before the block"
                elif not runs:
                    checked(words)
                else:
                    code, out, err = command(*words[1:])
                    shown = [*(shown or []), out, err]
                    assert code == 0, f"{shlex.join(words)}\n{out}\n{err}"
    if absent:
        pytest.skip(f"some blocks were checked but not run: {'; '.join(absent)}")


@pytest.fixture
def missing(request: pytest.FixtureRequest) -> Callable[[str], str | None]:
    """Why something that a block needs is not here; nothing if it is."""

    def why(need: str) -> str | None:
        if need != "minilm":
            place = Path(os.environ["CONFIDE_DATA"]) / need
            return None if place.is_dir() else f"{place} is not there"
        try:
            request.getfixturevalue(need)
        except pytest.skip.Exception as reason:
            return str(reason)
        return None

    return why


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_block_says_its_language_and_why_it_is_not_run(page: Path) -> None:
    found = list(blocks(page.read_text()))
    assert page.read_text().count("```") == 2 * len(found)
    for block in found:
        assert block.language in ("bash", "python", "yaml", "toml", "text", "json"), block.body
        if block.mark == "not run":
            assert len(block.said) > 10, block.body


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_inside_the_project_leads_somewhere(page: Path) -> None:
    for found in LINK.finditer(page.read_text()):
        target, _, anchor = found["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{found['target']} in {page.name}"
        if anchor:
            assert anchor in anchors(there), f"{found['target']} in {page.name}"


def test_links_and_anchors_are_found_at_all() -> None:
    targets = [found["target"] for page in PAGES for found in LINK.finditer(page.read_text())]
    assert sum(not re.match(r"[a-z]+:", target) for target in targets) > len(PAGES)
    assert anchors(ROOT / "docs" / "extend.md") >= {"bring-your-own", "your-own-rule"}
    assert make_targets() >= {"setup", "test", "test-all", "lint"}


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as the site makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site. Strict: a page that is not in the menu, a link that leads nowhere, a name without docs fail."""
    pytest.importorskip("mkdocs", reason="the site needs the extra docs")
    made = tmp_path_factory.mktemp("site")
    told = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(made)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    return made


def test_the_site_is_built_without_a_warning_and_asks_nothing_of_other_machines(site: Path) -> None:
    menu = {name for name in (ROOT / "docs").glob("*.md") if name.name not in (ROOT / "mkdocs.yml").read_text()}
    assert not menu
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]+src=[\"']?https?:|<link[^>]+rel=[\"']?stylesheet[^>]+href=[\"']?https?:"
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) >= len(PAGES) - 2  # all but the two that lie beside docs/
    for page in pages:
        assert not loads.search(page.read_text()), page


def test_the_site_lists_every_command_and_option_and_every_setting(site: Path) -> None:
    """The two pages are made from the program while the site is built; here it is asked in another way."""
    shown = html.unescape(re.sub(r"<[^>]+>", "", (site / "commands.html").read_text()))
    assert "made:" not in shown
    waiting: list[tuple[str, Any]] = [("confide", get_command(app))]
    for words, command in waiting:
        inner = getattr(command, "commands", {})
        waiting += [(f"{words} {name}", each) for name, each in inner.items() if not each.hidden]
        if not inner:
            page = shown[shown.index(f"{words} [") :] if f"{words} [" in shown else shown[shown.index(f"{words} ") :]
            for option in (name for each in command.params for name in each.opts if name.startswith("--")):
                assert option in page or option in ("--help", "--install-completion"), f"{words} {option}"
    assert len(waiting) > 40
    shown = html.unescape(re.sub(r"<[^>]+>", "", (site / "settings.html").read_text()))
    fields = [key for model in recipe.schema()["$defs"].values() for key in model["properties"]]
    assert len(fields) > 200
    assert not [key for key in {*fields, *recipe.schema()["properties"]} if key not in shown]


def test_the_site_is_searched_from_disk_and_cuts_no_command_off(
    site: Path, browser: Any, requested: Callable[[], list[str]]
) -> None:
    browser.get((site / "guarantee.html").as_uri())
    typed = (
        "document.querySelector('[data-md-toggle=search]').click();"
        "const e = document.querySelector('input.md-search__input'); e.focus(); e.value = 'canaries';"
        "e.dispatchEvent(new Event('keyup', {bubbles: true})); e.dispatchEvent(new Event('input', {bubbles: true}));"
        "return [...document.querySelectorAll('.md-search-result__link')].map((a) => a.getAttribute('href'))"
    )
    end = time.monotonic() + 30
    while not (found := browser.execute_script(typed)) and time.monotonic() < end:
        time.sleep(0.3)
    assert any("guarantee.html" in link for link in found), found
    cut = "return [...document.querySelectorAll('pre code')].filter((e) => e.scrollWidth > e.clientWidth + 1).length"
    for width in (1400, 420):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        assert browser.execute_script(cut) == 0
    assert [url for url in requested() if not url.startswith("file:")] == []


def test_an_output_that_no_command_printed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, missing: Callable[[str], str | None]
) -> None:
    fence, page = "```", tmp_path / "page.md"
    for line, right in (
        ("  12 owners to train on, 4.5 others", True), ("7 owners to train on, 1e-05 others", True), ("on", False)
    ):  # fmt: skip
        page.write_text(
            f"# A\n{fence}bash\nconfide x\n{fence}\n<!-- printed: numbers vary -->\n{fence}text\n{line}\n{fence}\n"
        )
        monkeypatch.setitem(globals(), "ROOT", tmp_path)
        (story,) = stories(page)
        said: Command = lambda *_: (0, "3 owners to train on, 2 others\n", "")  # noqa: E731
        if right:
            test_every_block_of_a_page_works(story, tmp_path, monkeypatch, said, missing)
        else:
            with pytest.raises(AssertionError, match="nothing printed 'on'"):
                test_every_block_of_a_page_works(story, tmp_path, monkeypatch, said, missing)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["confide", "train", "convex/digits", "--out", "runs/x"], ""),
        (["confide", "train", "convex/digits", "--out", "runs/x", "--set", "run.steps=two"], "run.steps='two'"),
        (["confide", "train", "convex/digit", "--out", "runs/x"], "did you mean 'convex/digits'"),
        (["confide", "trian", "convex/digits", "--out", "runs/x"], "No such command"),
        (["confide", "train", "convex/digits", "--uot", "runs/x"], "No such option"),
        (["confide", "plan", "epsilon", "--users", "5"], "No such option"),
    ],
)
def test_the_check_of_a_command_that_is_not_run_refuses_what_would_fail(words: list[str], wrong: str) -> None:
    if wrong:
        with pytest.raises(Exception, match=wrong) as refused:
            checked(words)
        assert isinstance(refused.value, UserError) or hasattr(refused.value, "exit_code")  # not a defect of the check
    else:
        checked(words)
