"""The site of the documents: it builds without a warning, and it says nothing to anybody else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds."""
    pytest.importorskip("material", reason="needs mkdocs-material, of nanovllm-core[dev]")
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_every_document_is_a_page_under_its_own_path(site: Path) -> None:
    """So that a relative link is right on GitHub and on the site."""
    globs = "docs/**/*.md", "plugins/*/README.md", "examples/plugins/**/README.md"
    for document in (document for glob in globs for document in ROOT.glob(glob)):
        name = "index.html" if document.stem == "README" else f"{document.stem}.html"
        assert (site / document.parent.relative_to(ROOT) / name).is_file(), document
    assert (site / "CHANGELOG.html").is_file()
    assert (site / "index.html").is_file(), "the README"


def test_a_program_that_a_document_links_to_is_a_page_that_shows_it(site: Path) -> None:
    page = (site / "examples/flash_attention.py.html").read_text(encoding="utf-8")
    assert "all that is kept of the softmax" in re.sub(r"<[^>]+>", "", page).lower()
    attention = (site / "docs/attention.html").read_text(encoding="utf-8")
    assert 'href="../examples/flash_attention.py.html"' in attention


def test_every_link_leads_to_a_file_of_the_site_also_from_the_disk(site: Path) -> None:
    """No link counts on a server that shows a folder's index.html; the 404 page is a server's."""
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for link in re.findall(r'<a[^>]*\bhref="([^"#]+)', page.read_text(encoding="utf-8")):
            if not re.match(r"\w+:", link):
                assert (page.parent / link).is_file(), f"{page.relative_to(site)}: {link}"


def test_a_reader_s_browser_asks_no_other_host(site: Path) -> None:
    """No fonts, scripts or pictures from elsewhere; links that a reader may follow are fine."""
    fetched = re.compile(r"""<(script|img|link|iframe)[^>]*(src|href)=["']?(https?:)?//[^>]*>""")
    for page in site.rglob("*.html"):
        found = fetched.search(page.read_text(encoding="utf-8"))
        assert found is None, f"{page.relative_to(site)}: {found and found[0]}"
