"""The pages: their links and anchors lead somewhere, their flags exist, and the README leads to all of them."""

import re
from pathlib import Path

import pytest

from dflash_aot.bin import bundle, precompile, run, serve

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
FLAGS = {name for module in (precompile, run, serve, bundle) for name in module.FLAGS}


def strip_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def find_anchors(page: Path) -> set[str]:
    """Anchors as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", strip_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def find_broken_links(page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", strip_code(page.read_text())):
        if re.match(r"\w+://", link):
            continue
        name, _, anchor = link.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in find_anchors(file)):
            broken.append(link)
    return broken


def find_unknown_flags(page: Path) -> list[str]:
    """Of the command lines of precompile, run, serve and bundle, with their continuation lines."""
    text = page.read_text().replace("\\\n", " ")
    lines = re.findall(r"dflash-(?:precompile|run|serve|bundle)\b[^\n`]*", text)
    named = {flag for line in lines for flag in re.findall(r"--(\w+)", line.partition("#")[0])}
    return sorted(flag for flag in named if flag not in FLAGS and flag.removeprefix("no") not in FLAGS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_and_anchors_lead_somewhere(page):
    assert find_broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_flags_of_commands_exist(page):
    assert find_unknown_flags(page) == []


def test_readme_leads_to_every_page():
    linked = set(re.findall(r"\]\((?:docs/)?([\w-]+\.md)", (REPOSITORY / "README.md").read_text()))
    linked |= set(re.findall(r"\]\(([\w-]+\.md)", (DOCS / "benchmarks.md").read_text()))
    assert {page.name for page in DOCS.glob("*.md")} <= linked


def test_files_named_by_the_architecture_page_exist():
    named = re.findall(r"`((?:bin|cache|compile|runtime|tests)/[\w/.]*)`", (DOCS / "architecture.md").read_text())
    assert len(named) > 20
    assert [name for name in named if not (REPOSITORY / name).exists()] == []
