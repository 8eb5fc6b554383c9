"""The README: its plugin works as shown, its table is measured, its map is complete."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
FENCED = re.compile(r"^```.*?^```\n", re.MULTILINE | re.DOTALL)
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
FILES = dict(FILE.findall(TEXT))


def rows(header: str) -> list[list[str]]:
    """The cells of the table whose first header is `header`."""
    table = TEXT.split(f"| {header} |")[1].split("\n\n")[0]
    return [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_it_is_read_in_five_minutes() -> None:
    """About 700 words of prose and tables, the code apart."""
    prose = re.sub(r"\]\([^)]*\)", "]", FENCED.sub("", TEXT))
    assert 600 <= len(re.findall(r"[A-Za-z0-9][\w'.,/+-]*", prose)) <= 780


def test_every_distribution_is_installed_from_a_checkout_by_a_line_of_the_install_page() -> None:
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    for project in ROOT.glob("plugins/*/pyproject.toml"):
        assert f"-e plugins/{project.parent.name}" in page
        assert page.count(f"`plugins/{project.parent.name}`") == 1, "a row of the table"


# -- the map --------------------------------------------------------------------------------------


def test_the_map_has_a_sentence_for_every_room_of_the_core() -> None:
    told = {name.strip("`/"): text for name, text in rows("in `nanovllm_core/`")}
    rooms = {path.parent.name for path in ROOT.glob("nanovllm_core/*/__init__.py")}
    assert set(told) == rooms - {"testing"}, "testing holds an error that names nanovllm_kit"
    assert all(told.values())


def test_the_map_has_a_sentence_and_a_link_for_every_distribution() -> None:
    told = dict(rows("in `plugins/`"))
    assert len(told) == len(rows("in `plugins/`")), "each once"
    folders = {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    assert set(told) == {f"[`{name}`](plugins/{name}/README.md)" for name in folders}
    assert all(told.values())


# -- the table ------------------------------------------------------------------------------------


def test_the_speed_table_is_what_the_result_files_say() -> None:
    """Rates, ratios and shares are computed from the raw times; no figure is typed by hand."""
    benchmarks = ROOT / "benchmarks"
    peers = json.loads((benchmarks / "peers.json").read_text())["tokens_per_second"]
    best: dict[str, tuple[float, float]] = {}
    for file in (benchmarks / "results/h200").glob("*.json"):
        if file.name.startswith(("throughput_", "fixed_")):
            result = json.loads(file.read_text())
            seconds = min(result["seconds"])
            share = result["roofline"]["floor_seconds"] / seconds
            one = result["output_tokens"] / seconds, share
            best[result["workload"]] = max(best.get(result["workload"], one), one)
    written = rows("workload")
    assert {row[0] for row in written} == set(peers)
    for workload, *cells in written:
        (rate, share), peer = best[workload], max(peers[workload].values())
        assert cells == [f"{rate:,.0f}", f"{peer:,}", f"{rate / peer:.2f}", f"{100 * share:.0f} %"]
        assert rate > peer, "the README says: faster than each of them"


# -- the plugin -----------------------------------------------------------------------------------

ORDER = """
from nanovllm_core import LLM, SamplingParams

asked = dict(temperature=0, max_tokens=4, ignore_eos=True)
with LLM(config_file="engine.yaml", cache={"num_blocks": 64}) as llm:
    outputs = llm.generate(
        ["A fox", "A key", "A cat"],
        [SamplingParams(priority=priority, **asked) for priority in (1, 1, 0)],
        use_tqdm=False,
    )
waits = [output.wait_steps for output in outputs]
print("order", sorted(range(3), key=waits.__getitem__))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the README, and their distribution, installed by pip into `site`."""
    folder = tmp_path_factory.mktemp("readme")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    pip = sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"
    more = "--no-build-isolation", "--disable-pip-version-check", "--target", folder / "site"
    subprocess.run([*pip, *more, folder], check=True)
    # Only the installed copy is to be found.
    (folder / "batch_last.py").unlink()
    return folder


def run(installed: Path, *arguments: str) -> str:
    """Run Python where the plugin is installed; all that it prints."""
    path = os.pathsep.join(filter(None, [str(installed / "site"), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": path, "NANOVLLM_DEVICE": "cpu"},
        cwd=installed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_the_plugin_is_as_short_as_its_heading_says() -> None:
    """Fifteen lines or two more; blank ones do not count."""
    assert "## A plugin in fifteen lines" in TEXT
    assert sum(bool(line.strip()) for line in FILES["batch_last.py"].splitlines()) <= 17


SUITE = "-m", "nanovllm_core", "plugins", "test", "batch_last"
BOUND = "-k", "no request is passed over for longer than declared"


@pytest.mark.parametrize(
    "checks", [pytest.param((), id="all", marks=pytest.mark.slow), pytest.param(BOUND, id="one")]
)
def test_the_plugin_installs_and_passes_its_suite(installed: Path, checks: tuple[str, ...]) -> None:
    printed = run(installed, *SUITE, *checks)
    assert re.search(r"passed +no request is passed over for longer than declared", printed), (
        printed
    )
    assert "batch_last keeps the contract" in printed, printed


def test_the_plugin_admits_an_interactive_request_before_batch_requests_that_came_first(
    installed: Path,
) -> None:
    for name in ("checkpoint_demo", "model_qwen3", "attention_sdpa"):
        pytest.importorskip(f"nanovllm_{name}", reason=f"needs the plugin {name}")
    assert "order [2, 0, 1]" in run(installed, "-c", ORDER)
    fcfs = ORDER.replace("cache=", 'scheduler="fcfs", cache=')
    assert "order [0, 1, 2]" in run(installed, "-c", fcfs), "without it, by arrival"


def test_a_broken_bound_would_be_noticed(installed: Path) -> None:
    """The suite that the README names fails for the same policy without patience."""
    module = installed / "site/batch_last.py"
    text = module.read_text(encoding="utf-8")
    module.write_text(text.replace("+ 50 *", "+ 500_000 *"), encoding="utf-8")
    try:
        with pytest.raises(AssertionError, match="BREAKS the contract"):
            run(installed, *SUITE, "-k", "keys keep the declared bound")
    finally:
        module.write_text(text, encoding="utf-8")
