"""Text to ids and back: incremental decoding, end-of-sequence ids, chat templates, bad folders."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import given, settings
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from nanovllm_core.config.settings import RESERVED
from nanovllm_core.errors import CheckpointError, InvalidPromptError
from nanovllm_core.frontend.tokenizer import Tokenizer, checkpoint_eos_token_ids

SPECIAL = ["<|end|>", "<|begin|>", "<|user|>", "<|stop|>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "<|user|>{{ m['role'] }}: {{ m['content'] }}<|stop|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)
TEXT = "hello world, 日本語のテスト, 👩‍👩‍👧 family, naïve café, Ωμέγα"


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint folder with a byte-level BPE tokenizer; a text begins with <|begin|>."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,  # asked for; the text gives fewer merges
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 20, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 1)]
    )
    backend.enable_truncation(4)
    path = tmp_path_factory.mktemp("checkpoint")
    backend.save(str(path / "tokenizer.json"))
    write_json(path / "generation_config.json", {"eos_token_id": [2, 0]})
    write_json(path / "config.json", {"eos_token_id": 0})
    config = {"eos_token": {"content": "<|stop|>"}, "chat_template": TEMPLATE}
    write_json(path / "tokenizer_config.json", config)
    return path


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.find(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return load(folder)


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    """A copy of the folder that a test may break."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_text_survives_encoding_and_decoding(tokenizer):
    """Special tokens are added and taken out; a truncation setting in the file is not obeyed."""
    ids = tokenizer.encode(TEXT)
    assert ids[0] == 1
    assert tokenizer.decode(ids) == TEXT


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60), data=st.data())
def test_pushes_and_the_flush_make_the_decoded_text(tokenizer, text, data):
    """However a text's ids are cut into pushes."""
    check_pushes(tokenizer, tokenizer.encode(text), data)
    detokenizer = tokenizer.detokenizer()
    pushed = "".join(detokenizer.push([i]) for i in tokenizer.encode(text))
    if "\ufffd" not in text:
        assert pushed == text, "complete text needs no flush"
        assert detokenizer.flush() == ""


@settings(max_examples=150, deadline=None)
@given(raw=st.binary(max_size=40), data=st.data())
def test_random_bytes_decode_the_same_in_pieces(tokenizer, raw, data):
    """Ids of single bytes, most of which are no UTF-8 at all."""
    alphabet = dict(zip(range(256), byte_tokens(), strict=True))
    ids = [tokenizer.backend.token_to_id(alphabet[byte]) for byte in raw]
    check_pushes(tokenizer, ids, data)
    assert tokenizer.decode(ids) == raw.decode("utf-8", errors="replace")


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 400), max_size=40), data=st.data())
def test_any_ids_decode_the_same_in_pieces(tokenizer, ids, data):
    """Special tokens and ids beyond the vocabulary (a padded embedding's) among them."""
    check_pushes(tokenizer, ids, data)


def check_pushes(tokenizer: Tokenizer, ids: list[int], data: st.DataObject) -> None:
    detokenizer, text, rest = tokenizer.detokenizer(), "", ids
    while rest and data.draw(st.booleans()):
        size = data.draw(st.integers(1, len(rest)))
        text += detokenizer.push(rest[:size])
        rest = rest[size:]
        assert tokenizer.decode(ids).startswith(text)
    assert text + detokenizer.flush(rest) == tokenizer.decode(ids)
    assert detokenizer.flush() == ""


def byte_tokens() -> list[str]:
    """Each byte's character in the byte-level alphabet of GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = (chr(256 + i) for i in range(256 - len(printable)))
    return [chr(byte) if byte in printable else next(shifted) for byte in range(256)]


@pytest.mark.parametrize("character", ["é", "日", "👧"])
def test_a_character_of_several_tokens_comes_whole(tokenizer, character):
    """Nothing while its bytes are incomplete, then the character, never U+FFFD."""
    tokens = byte_tokens()
    ids = [tokenizer.backend.token_to_id(tokens[byte]) for byte in character.encode()]
    detokenizer = tokenizer.detokenizer()
    pushed = [detokenizer.push([token_id]) for token_id in ids]
    assert pushed == [""] * (len(ids) - 1) + [character]


def test_an_incomplete_last_character_comes_with_the_flush(tokenizer):
    tokens = byte_tokens()
    ids = [tokenizer.backend.token_to_id(tokens[byte]) for byte in b"ab\xe6\x97"]
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(ids) == "ab"
    assert detokenizer.flush() == "\ufffd"


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory) -> Tokenizer:
    """A tokenizer in the manner of Llama 2: words, and 256 tokens for what is no word."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁", "ing"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    model = models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    path = tmp_path_factory.mktemp("byte_fallback")
    backend.save(str(path / "tokenizer.json"))
    return load(path)


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [tokenizer.backend.token_to_id(token) for token in tokens]


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        (["<0x0A>", "<0xC5>", "ing", "ing"], ["\n", "", "\ufffding", "ing"]),
        (["▁the", "<0x0A>", "<0xC5>", "▁the", "ing"], ["the", "\n", "", "\ufffd the", "ing"]),
        (["<0x0A>", "<0xC5>"], ["\n", "\ufffd"]),
    ],
)
def test_bytes_that_are_no_character_do_not_end_the_text(byte_fallback, tokens, pieces):
    """They make the library decode the newline before them anew, as U+FFFD: it stays as it was."""
    detokenizer, ids = byte_fallback.detokenizer(), ids_of(byte_fallback, *tokens)
    assert [detokenizer.push([i]) for i in ids[:-1]] + [detokenizer.flush(ids[-1:])] == pieces


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_bytes_among_words_lose_no_word(byte_fallback, data):
    """Random bytes and words, in pieces: no error, and every word once and in its place."""
    some = st.sampled_from([1 + 0x0A, 1 + 0xC5, 1 + 0x85, 1 + 0xF0, 257, 258, 259])
    rest = ids = data.draw(st.lists(some, max_size=30))
    detokenizer, text = byte_fallback.detokenizer(), ""
    while rest and data.draw(st.booleans()):
        size = data.draw(st.integers(1, len(rest)))
        text += detokenizer.push(rest[:size])
        rest = rest[size:]
    text += detokenizer.flush(rest)
    words = [{257: "the", 259: "ing"}.get(token_id, "") for token_id in ids]
    assert "".join(c for c in text if c in "theing") == "".join(words)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30), data=st.data())
def test_text_in_bytes_decodes_the_same_in_pieces(byte_fallback, text, data):
    """Whole characters, each in the tokens of its bytes."""
    check_pushes(byte_fallback, [1 + byte for byte in text.encode()], data)


@settings(max_examples=100, deadline=None)
@given(
    raw=st.lists(st.sampled_from(b"\x80\xbf\xe6\xf0\x97\xff"), min_size=20, max_size=60),
    data=st.data(),
)
def test_long_runs_of_bytes_that_are_no_text_decode_the_same_in_pieces(tokenizer, raw, data):
    """Also where some of them begin a character that never comes."""
    tokens = byte_tokens()
    check_pushes(tokenizer, [tokenizer.backend.token_to_id(tokens[byte]) for byte in raw], data)


@pytest.mark.parametrize("kind", ["special", "unknown", "no text"])
def test_ids_without_text_do_not_pile_up(tokenizer, kind):
    """Each push decodes a few ids again, and not all since the last text."""
    ids = {
        "special": tokenizer.eos_token_ids[0],
        "unknown": tokenizer.backend.get_vocab_size() + 7,
        "no text": tokenizer.backend.token_to_id(byte_tokens()[0x80]),
    }
    detokenizer, text = tokenizer.detokenizer(), ""
    for _ in range(200):
        text += detokenizer.push([ids[kind]])
        assert len(detokenizer._token_ids) - detokenizer._num_given <= 16
    assert text + detokenizer.flush() == tokenizer.decode([ids[kind]] * 200)


@pytest.mark.parametrize("stated", [True, False, None])
def test_a_text_begins_with_the_token_that_the_config_adds(copied, stated):
    """DeepSeek's tokenizer.json leaves it to tokenizer_config.json. It never comes twice."""
    config = {"bos_token": {"content": "<|begin|>"}, "add_bos_token": stated}
    write_json(copied / "tokenizer_config.json", config)
    assert load(copied).encode("hello")[:2].count(1) == 1, "tokenizer.json adds it"
    backend = tokenizers.Tokenizer.from_file(str(copied / "tokenizer.json"))
    for processor in (processors.ByteLevel(trim_offsets=False), None):
        backend.post_processor = processor or processors.Sequence([])
        backend.save(str(copied / "tokenizer.json"))
        tokenizer = load(copied)
        plain = tokenizer.encode("hello", add_special_tokens=False)
        assert 1 not in plain
        assert tokenizer.encode("hello") == [1] * (stated is True) + plain


def state_tokens(folder: Path, stated: dict[str, int], is_recent: bool) -> None:
    """Write tokens, and the ids of them, into the file that such a folder has for them."""
    if not is_recent:
        write_json(folder / "added_tokens.json", stated)
        return
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    decoder = {str(i): {"content": text, "special": False, **flags} for text, i in stated.items()}
    config = {"eos_token": "<|stop|>", "added_tokens_decoder": decoder}
    write_json(folder / "tokenizer_config.json", config)


@pytest.mark.parametrize("is_recent", [False, True], ids=["an old folder", "a recent one"])
def test_tokens_that_only_the_files_beside_tokenizer_json_state_are_added(
    copied, tokenizer, is_recent
):
    """They stay whole in a prompt, and do not vanish from the text."""
    size = tokenizer.backend.get_vocab_size()
    write_json(copied / "tokenizer_config.json", {"eos_token": "<|stop|>"})
    state_tokens(copied, {"<think>": size, "</think>": size + 1, "<|user|>": 2}, is_recent)
    loaded = load(copied)
    theirs = PreTrainedTokenizerFast.from_pretrained(copied)
    for text in ("<think>hello</think> world", "<|user|>hello<|stop|>"):
        ids = loaded.encode(text)
        assert ids == theirs(text).input_ids
        assert loaded.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert {size, size + 1} <= set(loaded.encode("<think>hello</think>"))


def test_a_token_is_special_where_tokenizer_config_says_so(copied, tokenizer):
    """tokenizer.json may say otherwise; such a token has no text."""
    backend = tokenizers.Tokenizer.from_file(str(copied / "tokenizer.json"))
    backend.add_tokens(["<think>"])
    backend.save(str(copied / "tokenizer.json"))
    number = backend.token_to_id("<think>")
    assert load(copied).decode([number]) == "<think>"
    stated = {number: {"content": "<think>", "special": True}}
    write_json(copied / "tokenizer_config.json", {"added_tokens_decoder": stated})
    assert load(copied).decode([number]) == ""
    assert not load(copied).has_text(number)


@pytest.mark.parametrize("is_recent", [False, True], ids=["an old folder", "a recent one"])
def test_a_token_that_cannot_have_the_id_that_is_stated_is_named(copied, tokenizer, is_recent):
    size = tokenizer.backend.get_vocab_size()
    state_tokens(copied, {"<think>": size + 7}, is_recent)
    with pytest.raises(
        CheckpointError, match=f"'<think>' the id {size + 7}.*gives it {size}.*save"
    ):
        load(copied)


def test_null_for_the_added_tokens_is_that_there_are_none(copied):
    """The special tokens are then where an older folder has them."""
    write_json(copied / "tokenizer_config.json", {"added_tokens_decoder": None})
    write_json(copied / "special_tokens_map.json", {"eos_token": "<|stop|>"})
    assert load(copied).eos_token_ids == (2, 0, 3)


@pytest.mark.parametrize("entry", [5, {"text": "a"}, {"content": 5}, None])
def test_malformed_added_tokens_are_named(copied, entry):
    write_json(copied / "tokenizer_config.json", {"added_tokens_decoder": {"400": entry}})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json.*added_tokens_decoder"):
        load(copied)


def test_code_of_a_checkpoint_is_not_run(copied):
    """The error names a way that there is: no argument allows the code."""
    (copied / "tokenizer.json").unlink()
    code = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    write_json(copied / "tokenizer_config.json", code)
    (copied / "tokenization_own.py").write_text("raise SystemExit('the code runs')")
    with pytest.raises(CheckpointError, match=r"Python code .* is not run; set `tokenizer`"):
        load(copied)
    write_json(copied / "tokenizer_config.json", {"auto_map": None})
    with pytest.raises(CheckpointError, match="transformers cannot convert"):
        load(copied)


def test_detokenizers_of_one_tokenizer_do_not_mix(tokenizer):
    first, second = tokenizer.detokenizer(), tokenizer.detokenizer()
    hello, cafe = tokenizer.encode("hello"), tokenizer.encode("café")
    texts = ["", ""]
    for i in range(max(len(hello), len(cafe))):
        texts[0] += first.push(hello[i : i + 1])
        texts[1] += second.push(cafe[i : i + 1])
    assert texts == ["hello", "café"]


def test_bug_18_every_end_of_sequence_id_is_honoured(folder, tokenizer):
    """generation_config.json's list, config.json's single id and the tokenizer's own token."""
    assert checkpoint_eos_token_ids(folder) == (2, 0)
    assert tokenizer.eos_token_ids == (2, 0, 3)


@pytest.mark.parametrize("is_recent", [False, True], ids=["an old folder", "a recent one"])
def test_the_special_tokens_of_an_old_folder_are_in_a_file_of_their_own(copied, is_recent):
    """As for transformers, it does not count beside `added_tokens_decoder`."""
    recent = {"added_tokens_decoder": {}} if is_recent else {}
    config = {"eos_token": "<|user|>", "bos_token": "<|begin|>", **recent}
    write_json(copied / "tokenizer_config.json", config)
    write_json(copied / "special_tokens_map.json", {"eos_token": {"content": "<|stop|>"}})
    (copied / "chat_template.jinja").write_text("{{ bos_token }}a{{ eos_token }}", encoding="utf-8")
    loaded = load(copied)
    user, stop = 2, 3
    assert loaded.eos_token_ids == (2, 0, *([] if is_recent else [stop]))
    theirs = PreTrainedTokenizerFast.from_pretrained(copied)
    expected = theirs.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False)
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}]) == expected
    assert expected[-1] == (user if is_recent else stop)


@pytest.mark.parametrize("value", ["2", -1, [1, "x"], True, 1.5])
def test_a_malformed_end_of_sequence_id_is_named(copied, value):
    write_json(copied / "generation_config.json", {"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is"):
        load(copied)


@pytest.mark.parametrize("value", [None, 5, [5], [5, 5]])
def test_end_of_sequence_ids_may_be_none_one_or_many(copied, value):
    write_json(copied / "generation_config.json", {"eos_token_id": value})
    write_json(copied / "config.json", {})
    assert checkpoint_eos_token_ids(copied) == (() if value is None else (5,))


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_end_of_sequence_id_beyond_the_vocabulary_is_left_out(copied, name):
    """It can never be sampled, as where a vocabulary was cut; without a size, what fits counts."""
    for file in ("generation_config.json", "config.json"):
        write_json(copied / file, {})
    write_json(copied / name, {"eos_token_id": [5, 99, 100, 2**31, 2**70]})
    assert checkpoint_eos_token_ids(copied) == (5, 99, 100)
    config = {"vocab_size": 100, **({"eos_token_id": [99, 100]} if name == "config.json" else {})}
    write_json(copied / "config.json", config)
    assert checkpoint_eos_token_ids(copied) == ((99,) if name == "config.json" else (5, 99))


@pytest.mark.parametrize("outer", [{}, {"eos_token_id": None, "vocab_size": None}])
def test_ends_of_a_sequence_may_be_in_the_settings_of_text(copied, outer):
    """Gemma 3 nests them. What config.json itself states counts before them."""
    write_json(copied / "generation_config.json", {"eos_token_id": 1})
    text = {"eos_token_id": [5, 99, 100], "vocab_size": 100}
    write_json(copied / "config.json", {**outer, "text_config": text})
    assert checkpoint_eos_token_ids(copied) == (1, 5, 99)
    write_json(copied / "config.json", {"text_config": text, "eos_token_id": 7, "vocab_size": 8})
    assert checkpoint_eos_token_ids(copied) == (1, 7)
    write_json(copied / "config.json", {"text_config": "text"})
    assert checkpoint_eos_token_ids(copied) == (1,)


def test_the_tokenizers_own_end_beyond_the_vocabulary_is_left_out(copied):
    """A tokenizer may hold tokens for which the model has no row."""
    write_json(copied / "config.json", {"vocab_size": 3, "eos_token_id": 0})
    assert load(copied).eos_token_ids == (2, 0)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, b"\xff"], ids=["cut", "too deep", "bytes"])
def test_settings_that_are_no_json_are_named(copied, text):
    path = copied / "generation_config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=r"generation_config\.json (is not |cannot be )read"):
        checkpoint_eos_token_ids(copied)


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja"])
def test_a_file_that_may_not_be_read_is_named(copied, name, monkeypatch):
    """Root may read all, so the refusal is played."""
    (copied / name).write_text("{}")
    read = Path.read_text

    def refused(path, *args, **kwargs):
        if path.name == name:
            raise PermissionError(13, "Permission denied")
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read.*denied.*permissions"):
        load(copied)


def test_variables_reach_the_template_those_of_a_call_before_those_of_the_engine(folder, tmp_path):
    """One that it does not know is ignored; so is none at all."""
    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    template = (
        "{{ 'thinks' if enable_thinking | default(true) else 'answers' }} {{ messages[0].role }}"
    )
    (copied / "chat_template.jinja").write_text(template, encoding="utf-8")
    messages = [{"role": "user", "content": "hi"}]

    def text(engine: dict[str, object] | None, call: dict[str, object] | None) -> str:
        loaded = Tokenizer.find(copied, engine)
        assert loaded is not None
        return loaded.decode(loaded.apply_chat_template(messages, chat_template_kwargs=call))

    off = {"enable_thinking": False, "unknown": 1}
    assert text(None, None) == "thinks user"
    assert text(off, None) == text(None, off) == "answers user"
    assert text(off, {"enable_thinking": True}) == "thinks user"


def test_names_that_the_engine_sets_are_no_variables_of_a_template(tokenizer):
    """They are all of the arguments of transformers' functions but the inputs of a template, and
    `messages`."""
    messages = [{"role": "user", "content": "hi"}]
    for name in RESERVED:
        with pytest.raises(InvalidPromptError, match=f"'{name}' is set by the engine itself"):
            tokenizer.apply_chat_template(messages, chat_template_kwargs={name: False})
    for wrong in (["x"], {5: 1}, {"a b": 1}):
        with pytest.raises(InvalidPromptError, match="chat_template_kwargs"):
            tokenizer.apply_chat_template(messages, chat_template_kwargs=wrong)
    functions = (PreTrainedTokenizerFast.apply_chat_template, render_jinja_template)
    arguments = {name for one in functions for name in inspect.signature(one).parameters}
    assert arguments - {"kwargs", "tools", "documents"} | {"messages"} == RESERVED


def test_whatever_a_template_raises_is_an_error_of_the_prompt(tokenizer):
    with pytest.raises(InvalidPromptError, match="refuses messages of the roles user"):
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], chat_template_kwargs={"tools": 5}
        )


def test_the_chat_template_is_applied_without_doubling_special_tokens(tokenizer):
    messages = [{"role": "user", "content": "hello"}]
    user, stop = 2, 3
    ids = tokenizer.apply_chat_template(messages)
    assert ids.count(user) == 2
    assert ids.count(stop) == 1
    assert ids.count(1) == 0, "the template decides where a text begins"
    assert tokenizer.decode(ids) == "user: helloassistant: "
    closed = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert tokenizer.decode(closed) == "user: hello"


def test_a_template_file_and_a_list_of_templates_are_found(copied):
    messages = [{"role": "user", "content": "hi"}]
    (copied / "chat_template.jinja").write_text("file{{ eos_token }}", encoding="utf-8")
    loaded = load(copied)
    assert loaded.backend.decode(loaded.apply_chat_template(messages), False) == "file<|stop|>"
    (copied / "chat_template.jinja").unlink()
    entries = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    write_json(copied / "tokenizer_config.json", {"chat_template": entries})
    loaded = load(copied)
    assert loaded.decode(loaded.apply_chat_template(messages)) == "d"


def test_templates_of_which_none_is_the_default_are_named(copied):
    """Which of them a conversation needs is not guessed."""
    entries = [{"name": name, "template": "t"} for name in ("tool_use", "rag")]
    write_json(copied / "tokenizer_config.json", {"chat_template": entries})
    loaded = load(copied)
    loaded.load_chat_template()
    said = r"only chat templates named 'tool_use', 'rag', .* or write the one to use to chat_temp"
    with pytest.raises(InvalidPromptError, match=said):
        loaded.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("entry", ["default", {"name": "default"}, {"name": [], "template": "t"}])
def test_a_malformed_list_of_templates_is_named(copied, entry):
    write_json(copied / "tokenizer_config.json", {"chat_template": [entry]})
    with pytest.raises(CheckpointError, match=r"config\.json: chat_template is \[.*; fetch the"):
        load(copied)


def test_a_missing_template_says_what_to_do(copied):
    (copied / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidPromptError, match=r"no chat template .* pass the prompt as text"):
        load(copied).apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_template_that_refuses_its_messages_is_an_invalid_prompt(tokenizer):
    with pytest.raises(InvalidPromptError, match="roles user, robot: unknown role robot"):
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}]
        )


@pytest.mark.parametrize(
    "messages", [[], 5, ["hello"], [{"role": "user"}], [{"role": "user", "content": 3}]], ids=str
)
def test_malformed_messages_are_refused(tokenizer, messages):
    with pytest.raises(InvalidPromptError, match="they must be one or more"):
        tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize("text", [7, None, b"bytes", ["list"]])
def test_what_is_no_text_is_refused(tokenizer, text):
    with pytest.raises(InvalidPromptError, match="expected text, got"):
        tokenizer.encode(text)


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(InvalidPromptError, match="surrogate"):
        tokenizer.encode("a\ud83d")


def test_a_folder_without_a_tokenizer_gives_none(tmp_path):
    assert Tokenizer.find(tmp_path) is None


def test_a_path_that_is_no_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        Tokenizer.find(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("content", ["{", "[1]", "version https://git-lfs.github.com/spec/v1"])
def test_a_broken_file_is_named(copied, name, content):
    (copied / name).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=name):
        load(copied)


def test_a_folder_of_another_format_goes_through_transformers(tmp_path, tokenizer):
    """vocab.json and merges.txt of a GPT-2 tokenizer, without tokenizer.json."""
    model = json.loads(tokenizer.backend.to_str())["model"]
    write_json(tmp_path / "vocab.json", model["vocab"])
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    write_json(tmp_path / "config.json", {"model_type": "gpt2"})
    loaded = load(tmp_path)
    assert loaded.decode(loaded.encode("hello world")) == "hello world"


def test_a_format_that_transformers_cannot_read_says_what_to_do(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"not a sentencepiece model")
    with pytest.raises(CheckpointError, match="save_pretrained"):
        load(tmp_path)


def test_reading_a_tokenizer_imports_neither_torch_nor_transformers(folder):
    code = (
        "import sys; from nanovllm_core.frontend.tokenizer import Tokenizer; "
        f"Tokenizer.find({str(folder)!r}).encode('hi'); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
