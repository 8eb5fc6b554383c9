"""Hooks of mkdocs: the site mirrors the repository.

Every document keeps its path (`docs/plugins.md`, `plugins/scheduler_sjf/README.md`), so a relative
link that is right on GitHub is right on the site too, and mkdocs checks it as any other. A file
that a document links to and that is no document itself (a program, a configuration) becomes a page
that shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    "*.md",
    "docs/**/*.md",
    "plugins/*/*.md",
    "plugins/*/training/*.md",
    "examples/plugins/*.md",
    "examples/plugins/*/*.md",
    "benchmarks/results/*/*.md",
)
IMAGES = ("benchmarks/results/*/*.svg", "docs/images/*.png")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by the repository's documents and what they link to."""
    for file in [*files.documentation_pages(), *files.media_files()]:
        if (ROOT / "docs" / file.src_uri).exists():
            files.remove(file)
    documents = sorted({path for glob in DOCUMENTS for path in ROOT.glob(glob)})
    images = [path for glob in IMAGES for path in ROOT.glob(glob)]
    for path in (*documents, *images):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for path in sorted({path for document in documents for path in shown_files(document)}):
        files.append(File.generated(config, page_of(path), content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to shown files to their pages; `yaml error` is a word for the tests."""
    here = (ROOT / page.file.src_uri).parent

    def lead(match: re.Match[str]) -> str:
        target = here / match[2]
        suffix = ".md" if is_shown(target) else ""
        return f"{match[1]}{match[2]}{suffix}{match[3]}"

    return LINK.sub(lead, markdown.replace("```yaml error\n", "```yaml\n"))


def shown_files(document: Path) -> Iterator[Path]:
    """The files that a document links to and that are neither documents nor images."""
    for match in LINK.finditer(document.read_text(encoding="utf-8")):
        target = document.parent / match[2]
        if is_shown(target):
            yield target.resolve()


def is_shown(target: Path) -> bool:
    return target.suffix in LANGUAGES and target.is_file()


def page_of(path: Path) -> str:
    return f"{path.relative_to(ROOT).as_posix()}.md"


def shown(path: Path) -> str:
    """A page that holds a file's text."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    return f"# {name}\n\n````{LANGUAGES[path.suffix]}\n{text}````\n"
