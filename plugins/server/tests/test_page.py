"""The page at `/` in headless Chromium: against a stub, and once against the real server."""

from __future__ import annotations

import importlib.util
import random
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

from nanovllm_server import page as page_package

HERE = Path(__file__).parent
STATIC = Path(page_package.__file__).with_name("static")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 20.0
expect.set_options(timeout=SECONDS * 1000)
STORY_START = "Once upon a time"


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def running_stub() -> Iterator[Any]:
    """The stub of page_stub.py, at its `url`."""
    spec = importlib.util.spec_from_file_location("page_stub", HERE / "page_stub.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.serve_stub() as stub:
        yield stub


@pytest.fixture
def stub(running_stub: Any) -> Iterator[Any]:
    """The stub, in its first state."""
    running_stub.reset()
    yield running_stub
    # The pages are closed by now, so every answer ends.
    wait_until(lambda: running_stub.running == 0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        try:
            browser = playwright.chromium.launch(executable_path=found)
        except Error as error:
            pytest.skip(f"no Chromium starts: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, stub: Any) -> Iterator[Callable[..., Page]]:
    """Opens the page in a context of its own; afterwards no request may have left the server."""
    contexts = []
    addresses: list[str] = []
    faults: list[str] = []

    def open_page(url: str = stub.url, **options: Any) -> Page:
        options.setdefault("viewport", {"width": 1200, "height": 800})
        context = browser.new_context(**options)
        context.set_default_timeout(SECONDS * 1000)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: addresses.append(request.url))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(url)
        page.locator("#status[data-state=unknown]").wait_for(state="detached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults
    assert all(address.startswith("http://127.0.0.1:") for address in addresses)


def ask(page: Page, text: str) -> None:
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")


def answer(page: Page, state: str = "done", at: int = 0) -> Any:
    """The answer of that number, once it is in that state."""
    shown = page.locator(".answer").nth(at)
    expect(shown).to_have_attribute("data-state", state)
    return shown


# ---------------------------------------------------------------- the conversation


def test_an_answer_appears_while_it_is_written(open_page: Any, stub: Any) -> None:
    """Words are on the page before the answer ends; the note counts its tokens."""
    page = open_page()
    stub.held = True
    ask(page, "Tell me a story")
    writing = answer(page, "streaming")
    expect(writing).to_have_attribute("aria-busy", "true")
    expect(writing.locator(".text")).to_contain_text(STORY_START)
    stub.held = False
    finished = answer(page)
    expect(finished.locator(".text")).to_contain_text("went home together.")
    expect(finished.locator(".note")).to_contain_text(
        re.compile(r"^5\d tokens · first after \d+ ms")
    )
    [request] = stub.requests
    assert request == {
        "model": "stand-in",
        "messages": [{"role": "user", "content": "Tell me a story"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_stopping_an_answer_ends_the_request(open_page: Any, stub: Any) -> None:
    """By Escape or the button: the server sees its client go, and the text stays."""
    page = open_page()
    ways = (lambda: page.keyboard.press("Escape"), page.get_by_role("button", name="Stop").click)
    for number, stop in enumerate(ways):
        ask(page, "Write forever")
        expect(page.locator(".answer .text").nth(number)).to_contain_text(STORY_START)
        stop()
        stopped = answer(page, "stopped", at=number)
        wait_until(lambda gone=number + 1: stub.disconnects == gone)
        expect(stopped.locator(".text")).to_contain_text(STORY_START)
        expect(stopped.locator(".note")).to_have_text("Stopped")
    ask(page, "Tell me a story")
    answer(page, at=2)


def test_a_new_chat_ends_the_answer_of_the_old_one(open_page: Any, stub: Any) -> None:
    """The page is as at its start, and the server sees its client go."""
    page = open_page()
    ask(page, "Write forever")
    expect(page.locator(".answer .text")).to_contain_text(STORY_START)
    page.get_by_role("button", name="New chat").click()
    wait_until(lambda: stub.disconnects == 1)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.get_by_role("heading", name="Ask the model")).to_be_visible()


def test_an_edited_message_replaces_what_followed(open_page: Any, stub: Any) -> None:
    """Editing the first of two questions drops both answers and asks again."""
    page = open_page()
    ask(page, "First question")
    answer(page)
    ask(page, "Second question")
    answer(page, at=1)
    page.locator(".user").first.hover()
    page.locator(".user").first.get_by_role("button", name="Edit").click()
    field = page.get_by_role("textbox", name="Edit message")
    expect(field).to_be_focused()
    field.fill("Another question")
    field.press("Enter")
    answer(page)
    expect(page.locator(".message")).to_have_count(2)
    assert stub.requests[-1]["messages"] == [{"role": "user", "content": "Another question"}]


def test_an_answer_can_be_written_again(open_page: Any, stub: Any) -> None:
    """The same question is sent, without the answer that is replaced."""
    page = open_page()
    ask(page, "A question")
    answer(page).get_by_role("button", name="Answer again").click()
    wait_until(lambda: len(stub.requests) == 2)
    answer(page)
    expect(page.locator(".answer")).to_have_count(1)
    assert stub.requests[0] == stub.requests[1]


def test_an_answer_can_be_copied(open_page: Any) -> None:
    """The clipboard has the answer's Markdown, or a block's code alone."""
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    ask(page, "markdown")
    finished = answer(page)
    finished.get_by_role("button", name="Copy answer").click()
    clipboard = "navigator.clipboard.readText()"
    wait_until(lambda: "**both halves**" in page.evaluate(clipboard))
    finished.get_by_role("button", name="Copy code").click()
    expect(page.locator("#announcer")).to_have_text("Copied")
    wait_until(lambda: page.evaluate(clipboard).startswith("def merge_sort"))


def test_settings_are_sent_only_if_they_are_filled_in(open_page: Any, stub: Any) -> None:
    """An empty field sends nothing, so the server's defaults hold."""
    page = open_page()
    page.get_by_role("tab", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Max tokens").fill("7")
    page.get_by_label("Stop strings").fill("one\ntwo")
    ask(page, "Hello")
    answer(page)
    request = stub.requests[-1]
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (request["temperature"], request["max_tokens"]) == (0.5, 7)
    assert request["stop"] == ["one", "two"]
    page.get_by_role("button", name="Reset sampling").click()
    ask(page, "Hello")
    answer(page, at=1)
    assert stub.requests[-1].keys() == {"model", "messages", "stream", "stream_options"}


# ---------------------------------------------------------------- errors and keys


def test_an_error_of_the_server_is_shown_with_its_text(open_page: Any) -> None:
    """It is an alert below what was written until then."""
    page = open_page()
    errors = (
        ("refuse", "", "No answer (400)max_tokens is 0; it is at least 1."),
        ("break", "Some words.", "No answerThe engine has failed."),
        ("vanish", "Some words.", "No answerThe connection ended before the answer was complete."),
    )
    for number, (question, written, shown) in enumerate(errors):
        ask(page, question)
        failed = answer(page, "failed", at=number)
        expect(failed.get_by_role("alert")).to_have_text(shown)
        expect(failed.locator(".text")).to_have_text(written)


def test_the_key_is_asked_for_and_kept_in_the_tab(open_page: Any, stub: Any) -> None:
    """Without the key the page says so; with it everything loads, and only this tab knows it."""
    stub.key = "a-key-of-this-test"
    page = open_page()
    expect(page.locator("#status")).to_have_text("API key needed")
    expect(page.get_by_label("API key")).to_be_focused()
    page.get_by_label("API key").fill(stub.key)
    page.get_by_label("API key").press("Tab")
    expect(page.locator("#model")).to_have_value("stand-in")
    page.reload()
    expect(page.locator("#model")).to_have_value("stand-in")
    ask(page, "Hello")
    answer(page)
    assert stub.key not in page.evaluate("JSON.stringify(localStorage)")
    assert page.context.cookies() == []


# ---------------------------------------------------------------- text of the model


def test_markup_and_scripts_of_the_model_stay_text(open_page: Any) -> None:
    """Nothing of a hostile answer becomes an element that it wrote, runs, or loads."""
    page = open_page()
    ask(page, "hostile")
    text = answer(page).locator(".text")
    expect(text).to_contain_text('<script>window.hacked = 1</script><img src=x onerror="window.')
    expect(text).to_contain_text("click (javascript:window.hacked=3)")
    names = text.evaluate("node => [...node.querySelectorAll('*')].map((each) => each.localName)")
    # The picture on a button that copies code is the page's own.
    assert set(names) <= {"p", "div", "span", "button", "svg", "use", "pre", "code", "ul", "li"}
    assert text.locator("[href]:not(use), [src], [onerror], [onload]").count() == 0
    assert page.evaluate("window.hacked") is None


MARKDOWN = [
    ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
    ("## A *b*", "<h4>A <em>b</em></h4>"),
    ("a **b `**` c** `d", "<p>a <strong>b <code>**</code> c</strong> `d</p>"),
    ("2 * 3 * 4 and a ** b", "<p>2 * 3 * 4 and a ** b</p>"),
    ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
    ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
    ("[a](b) & <i>", '<p>a<span class="address"> (b)</span> &amp; &lt;i&gt;</p>'),
]
MARKS = ("`", "*", "**a ", "> ", "- ", "[", "|-", "`a``")
RENDER = """async ([texts, steps]) => {
  const { showMarkdown } = await import("/page/markdown.js");
  return texts.map((text) => {
    const node = document.createElement("div");
    for (let end = 0; end < text.length; end += Math.ceil(text.length / steps))
      showMarkdown(node, text.slice(0, end));
    showMarkdown(node, text);
    return [node.innerHTML, node.textContent];
  });
}"""


def test_markdown_reads_as_written(open_page: Any) -> None:
    """Marks become elements where they pair, and stay where they do not."""
    rendered = open_page().evaluate(RENDER, [[text for text, _ in MARKDOWN], 1])
    assert [html for html, _ in rendered] == [expected for _, expected in MARKDOWN]


KEEP = """async () => {
  const { showMarkdown } = await import("/page/markdown.js");
  const node = document.createElement("div");
  showMarkdown(node, "one\\n\\n- two\\n\\nthr");
  const shown = [...node.children];
  showMarkdown(node, "one\\n\\n- two\\n\\nthree");
  return shown.map((each, at) => each === node.children[at]);
}"""


def test_a_paragraph_that_is_complete_keeps_its_element(open_page: Any) -> None:
    """So a selection in it survives while the answer goes on; only the last block is new."""
    assert open_page().evaluate(KEEP) == [True, True, False]


def test_markdown_is_the_same_in_a_stream_and_at_once(open_page: Any) -> None:
    """Drawn texts of marks and letters: shown in parts or whole alike, with every letter there."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("ab1 \n*`#>-|[]().~_\\<", k=200)) for _ in range(150)]
    texts += [
        mark * (8_000 // len(mark)) for mark in ("`", "*", "**a ", "> ", "- ", "[", "|-", "`a``")
    ]
    page = open_page()
    whole = page.evaluate(RENDER, [texts, 1])
    assert page.evaluate(RENDER, [texts, 7]) == whole
    for text, (_, shown) in zip(texts, whole, strict=True):
        if "`" not in text and "~" not in text:  # A fence's language stands in its bar.
            assert re.findall("[ab]", shown) == re.findall("[ab]", text)


# ---------------------------------------------------------------- everybody


def test_the_keyboard_is_enough(open_page: Any, stub: Any) -> None:
    """Skip link, message, new line, edit with the arrow, and the panel's tabs."""
    page = open_page()
    page.locator(".mark").click()  # The page begins in the message box; this goes before all.
    page.keyboard.press("Shift+Tab")
    expect(page.get_by_role("link", name="Skip to the message box")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    page.keyboard.press("Enter")
    answer(page)
    assert stub.requests[0]["messages"][0]["content"] == "two\nlines"
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("textbox", name="Edit message")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".bubble")).to_have_text("two\nlines")
    page.get_by_role("tab", name="Live").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Settings")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.get_by_label("System prompt")).to_be_focused()


def test_enter_that_ends_a_composed_character_sends_nothing(open_page: Any, stub: Any) -> None:
    """An input method for Chinese or Japanese uses Enter too."""
    page = open_page()
    page.locator("#prompt").fill("half a word")
    composing = {"key": "Enter", "isComposing": True, "bubbles": True}
    page.locator("#prompt").dispatch_event("keydown", composing)
    expect(page.locator("#prompt")).to_have_value("half a word")
    assert stub.requests == []


def test_a_screen_reader_hears_a_finished_answer_once(open_page: Any) -> None:
    """The text that is being written is in no live region; the announcer gets it at its end."""
    page = open_page()
    ask(page, "Tell me a story")
    assert answer(page).evaluate("node => node.closest('[aria-live], [role=log]')") is None
    announcer = page.get_by_role("status").and_(page.locator("[aria-live=polite]"))
    expect(announcer).to_contain_text("went home together.")


def test_a_phone_scrolls_in_one_direction_only(open_page: Any) -> None:
    """Nothing is wider than the screen; the panel covers the chat, and Escape closes it."""
    page = open_page(viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    ask(page, "Write markdown " + "long" * 40 + " markdown")
    answer(page)
    widths = "[document.documentElement, document.querySelector('#scroll')].map((node) => " \
        "node.scrollWidth - node.clientWidth)"  # fmt: skip
    assert page.evaluate(widths) == [0, 0]
    toggle = page.get_by_role("button", name="Engine and settings")
    toggle.click()
    expect(page.locator("main")).to_have_attribute("inert", "")
    for name in ("Live", "Settings", "Plugins"):
        page.get_by_role("tab", name=name).click()
        sheet = page.get_by_role("tabpanel")
        assert sheet.evaluate("node => node.scrollWidth - node.clientWidth") == 0
        small = "node => [...node.querySelectorAll('button, input')].filter((each) => " \
            "each.offsetParent && each.offsetHeight < 24).length"  # fmt: skip
        assert page.locator("body").evaluate(small) == 0
    page.keyboard.press("Escape")
    expect(toggle).to_be_focused()
    expect(page.locator("#panel")).to_be_hidden()


def test_the_theme_follows_the_system_until_it_is_chosen(open_page: Any) -> None:
    """A choice is kept over a reload; choosing the system's theme again forgets it."""
    page = open_page(color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    button = page.get_by_role("button", name="Dark theme")
    expect(button).to_have_attribute("aria-pressed", "true")
    button.click()
    light = page.evaluate(ground)
    assert light != dark
    page.reload()
    assert page.evaluate(ground) == light
    page.get_by_role("button", name="Dark theme").click()
    assert page.evaluate(ground) == dark
    assert page.evaluate("localStorage.length") == 0


def test_nothing_moves_where_motion_is_unwanted(open_page: Any) -> None:
    """The mark of an answer in progress stands still."""
    page = open_page(reduced_motion="reduce")
    ask(page, "Write forever")
    text = answer(page, "streaming").locator(".text")
    assert text.evaluate("node => getComputedStyle(node, '::after').animationName") == "none"


AUDIT = (HERE / "page_audit.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_controls_have_names_and_text_has_contrast(open_page: Any, scheme: str) -> None:
    """In each tab, with an answer, an error and an edited message in view."""
    page = open_page(color_scheme=scheme)
    assert page.evaluate(AUDIT) == []
    ask(page, "markdown")
    answer(page)
    ask(page, "break")
    answer(page, "failed", at=1)
    page.keyboard.press("ArrowUp")
    for name in ("Live", "Settings", "Plugins"):
        page.get_by_role("tab", name=name).click()
        assert page.evaluate(AUDIT) == []


# ---------------------------------------------------------------- the engine


def test_the_engine_is_shown_live(open_page: Any, stub: Any) -> None:
    """Values, lines and the words for those who do not see them; plugins with their reasons."""
    stub.pause = 0.001
    page = open_page()
    expect(page.locator("#status")).to_contain_text("running")
    charts = page.locator(".chart")
    expect(charts).to_have_count(7)
    throughput = charts.first
    assert re.fullmatch(r"[\d,.]+", throughput.locator(".value").inner_text())
    assert "Throughput: now" in (throughput.get_by_role("img").get_attribute("aria-label") or "")
    before = throughput.locator(".line").get_attribute("d")
    expect(throughput.locator(".line")).not_to_have_attribute("d", before or "")
    box = throughput.get_by_role("img").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 9)
    expect(throughput.locator(".title")).to_have_text(re.compile("Throughput (59|60) s ago"))
    page.get_by_role("tab", name="Plugins").click()
    expect(page.locator(".plugins li").first).to_contain_text("runs on this device")
    expect(page.locator(".choices")).to_have_text("kernels auto: not torch: triton comes first")


def test_an_engine_that_hangs_is_shown_as_such(open_page: Any, stub: Any) -> None:
    """With the reason of /health, until it answers again."""
    stub.problem = "the engine has not answered for 12.0 s"
    page = open_page()
    expect(page.locator("#status")).to_have_text("Engine stuck or ended")
    expect(page.locator("#status")).to_have_attribute("data-state", "down")
    expect(page.locator("#live-notice")).to_have_text(stub.problem)
    stub.problem = None
    expect(page.locator("#status")).to_have_text("Idle")
    expect(page.locator("#live-notice")).to_be_hidden()


def test_the_real_server_answers_the_page(open_page: Any, server_url: str) -> None:
    """The demo model adds two numbers; the panel has the engine's figures and plugins."""
    page = open_page(server_url)
    ask(page, "What is 457 + 386?")
    expect(answer(page).locator(".text")).to_have_text("843")
    expect(page.locator("#model")).to_have_value("demo")
    expect(page.locator("#status")).to_have_attribute("data-state", "ready")
    prefix = page.locator(".chart", has_text="Prefix hits")
    expect(prefix.locator(".value")).to_have_text(re.compile(r"^\d+(\.\d)?$"))
    page.get_by_role("tab", name="Plugins").click()
    expect(page.locator(".plugins")).to_contain_text("nanovllm-model-qwen3")


# ---------------------------------------------------------------- the files


def fetch(address: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return response.status, dict(response.headers), response.read()
    except HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_every_file_is_served_with_its_policy_and_once(stub: Any) -> None:
    """A browser that has a file is told so with 304; the policy allows this server only."""
    for name in ["", *(f"page/{path.name}" for path in STATIC.iterdir())]:
        status, headers, content = fetch(stub.url + name)
        assert (status, content) == (200, (STATIC / (name or "page/index.html")[5:]).read_bytes())
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert fetch(stub.url + name, **{"If-None-Match": headers["etag"]})[::2] == (304, b"")
        assert fetch(stub.url + name, **{"If-None-Match": '"other"'})[0] == 200
    assert fetch(stub.url + "page/../__init__.py")[0] == 404


def test_the_files_name_no_other_host_and_set_no_markup() -> None:
    """No address but SVG's name space, and no way to turn text into elements or code."""
    turns_text = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|DOMParser"
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(rf"https?:|{turns_text}", text), path.name
