"""Text to token ids and back, read from a checkpoint's folder.

A folder with a tokenizer.json needs the `tokenizers` library alone, which imports in a tenth of a
second; transformers comes in for chat templates, and for folders of other formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, processors
from tokenizers.decoders import DecodeStream
from tokenizers.processors import TemplateProcessing

from nanovllm_core.config.settings import check_chat_template_kwargs
from nanovllm_core.errors import CheckpointError, InvalidPromptError, shown
from nanovllm_core.selection.checkpoint_files import read_json, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"
"""The replacement for bytes that are not valid UTF-8, or that are an incomplete character."""
OTHER_FORMATS = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_ADDED = "added_tokens_decoder"
"""The key of tokenizer_config.json with tokens beyond a vocabulary; older folders lack it."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LONGEST_VOCABULARY = 2**31  # the engine keeps ids as int32
_MOST_HELD = 16
"""Ids without text at most that a `Detokenizer` decodes again with the next one."""
_INCOMPLETE = 3
"""Bytes at most of an incomplete character in UTF-8, and so ids that can hold them."""


class Tokenizer:
    """The tokenizer of one checkpoint. Use `find` rather than the constructor.

    `eos_token_ids` is every id that ends a sequence. `chat_template_kwargs` are variables for every
    use of the chat template, which a call may override.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        folder: Path,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        # What a file may have switched on for training would cut prompts short here.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.folder = folder
        self._config = _read_settings(folder)
        if self._config.get("add_bos_token") is True:
            _begin_with(backend, _content(self._config.get("bos_token")))
        self._templates = _find_templates(folder, self._config)
        self._template_kwargs = dict(chat_template_kwargs or {})
        eos = _content(self._config.get("eos_token"))
        own = backend.token_to_id(eos) if eos else None
        self.eos_token_ids = checkpoint_eos_token_ids(folder, () if own is None else (own,))
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(number for number, token in added.items() if token.special)

    @classmethod
    def find(
        cls, folder: str | Path, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> Tokenizer | None:
        """Read the tokenizer of a folder; None where it has no file of one."""
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(
                f"tokenizer {shown(str(folder))} is not a folder; set `tokenizer` to a folder "
                "with a tokenizer.json, or leave it out to use the model's own"
            )
        if (folder / "tokenizer.json").is_file():
            backend = _read_backend(folder / "tokenizer.json")
            _add_tokens(backend, folder)
        elif any((folder / name).is_file() for name in OTHER_FORMATS):
            backend = _convert_with_transformers(folder)
        else:
            return None
        return cls(backend, folder, chat_template_kwargs)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the special tokens that the checkpoint puts around one."""
        if not isinstance(text, str):
            raise InvalidPromptError(f"expected text, got {type(text).__name__}: {shown(text)}")
        try:
            # `encode` holds Python's lock, and other threads wait: a second for a megabyte.
            [encoding] = self.backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return encoding.ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidPromptError(
                f"the text {shown(text)} has half of a surrogate pair, which is no Unicode text; "
                "decode its bytes with errors='replace'"
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, without special tokens. Bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=True)

    def has_text(self, token_id: int) -> bool:
        """Whether `decode` looks at an id: special ones, and unknown ones, change no text."""
        known = self.backend.id_to_token(token_id) is not None
        return known and token_id not in self._special_ids

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder, for one sequence."""
        return Detokenizer(self)

    def load_chat_template(self) -> None:
        """Load what applies the chat template, which takes a second at its first use otherwise.

        For programs that must not stand still then. Nothing where the checkpoint has no template.
        """
        if "default" in self._templates:
            self._renderer  # noqa: B018 - reading it makes it

    def require_chat_template(self) -> str:
        """The checkpoint's default template; InvalidPromptError where it has none."""
        if "default" in self._templates:
            return self._templates["default"]
        found, remedy = "no chat template", "use a model made for chat"
        if names := ", ".join(map(shown, self._templates)):
            found = f"only chat templates named {names}, and none named 'default',"
            remedy = "write the one to use to chat_template.jinja there"
        raise InvalidPromptError(
            f"the checkpoint at {self.folder} has {found} (in tokenizer_config.json or "
            f"chat_template.jinja); pass the prompt as text or token ids, or {remedy}"
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a conversation of `{"role", "content"}`, as the checkpoint's template has it.

        `add_generation_prompt` opens the assistant's turn at the end. `chat_template_kwargs` are
        further variables for the template (`{"enable_thinking": False}`); it ignores those that it
        does not know. Raises InvalidPromptError where there is no template, or it refuses.
        """
        template = self.require_chat_template()
        conversation = _check_messages(messages)
        try:
            given = check_chat_template_kwargs(chat_template_kwargs or {})
        except ValueError as error:
            raise InvalidPromptError(f"chat_template_kwargs: {error}") from None
        try:
            text = self._renderer.apply_chat_template(
                conversation,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **{**self._template_kwargs, **given},
            )
        except Exception as error:  # a template is the checkpoint's code: it may raise anything
            roles = ", ".join(message["role"] for message in conversation)
            raise InvalidPromptError(
                f"the checkpoint's chat template refuses messages of the roles {roles}: {error}"
            ) from error
        # The template writes the special tokens itself.
        return self.encode(str(text), add_special_tokens=False)

    @cached_property
    def _renderer(self) -> PreTrainedTokenizerFast:
        """Renders templates as transformers does, with the special tokens they may name."""
        from transformers import PreTrainedTokenizerFast

        texts = {key: _content(value) for key, value in self._config.items()}
        special = {key: text for key, text in texts.items() if text and key.endswith("_token")}
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # transformers has no types
            tokenizer_object=self.backend, **special
        )


class Detokenizer:
    """Turns one sequence's ids into text as they come; `push` never splits a character.

    What was given out stays, even where it is not how a later `decode` of all ids begins: in
    vocabularies that fall back to bytes, those that are no UTF-8 change the text of bytes before.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._start = 0
        """Ids before this one were given out, and have no part in the text after them."""
        self._num_given = 0
        """Ids whose text was given out."""
        self._text: list[str] = []
        """What was given out of the ids from `_start` on."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these further ids complete; "" while a character is incomplete."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self, token_ids: Sequence[int] = ()) -> str:
        """The rest with these last ids: an incomplete character at the end becomes U+FFFD.

        A whole sequence is decoded in one call, ten times faster than id by id.
        """
        self._token_ids += token_ids
        text = self._tokenizer.decode(self._token_ids[self._start :])
        given = "".join(self._text)
        if not text.startswith(given):
            text, given = self._tokenizer.decode(self._token_ids[self._num_given :]), ""
        self._give(text[len(given) :])
        return text[len(given) :]

    def _push_one(self, token_id: int) -> str:
        if not self._tokenizer.has_text(token_id):
            return ""
        self._token_ids.append(token_id)
        try:
            text = self._stream.step(self._tokenizer.backend, token_id) or ""
        except Exception:  # the library raises no other for text that does not go on as it began
            text = self._start_anew()
        if text:
            self._give(text)
        elif len(self._token_ids) - self._num_given > _MOST_HELD:
            text = self._give_invalid()
        return text

    def _give_invalid(self) -> str:
        """The text of held ids, but for the last, of which alone more bytes can make a character.

        Otherwise a push would take the longer, the more bytes that are no UTF-8 came before it.
        Bytes of one U+FFFD stay together.
        """
        held, decode = self._token_ids[self._num_given :], self._tokenizer.decode
        ends, whole = range(len(held) - _INCOMPLETE, 1, -1), decode(held)
        end = next((n for n in ends if decode(held[:n]) + decode(held[n:]) == whole), 1)
        self._num_given += end
        if rest := self._start_anew():
            self._give(rest)
        return decode(held[:end]) + rest

    def _start_anew(self) -> str:
        """Decode the ids that were not given out apart from those that were."""
        self._start, self._text = self._num_given, []
        held = self._token_ids[self._start :]
        self._stream = DecodeStream(ids=held, skip_special_tokens=True)
        text = self._tokenizer.decode(held)
        return "" if text.endswith(REPLACEMENT) else text

    def _give(self, text: str) -> None:
        self._num_given = len(self._token_ids)
        self._text.append(text)


def checkpoint_eos_token_ids(folder: str | Path, more: Iterable[int] = ()) -> tuple[int, ...]:
    """The end-of-sequence ids of generation_config.json, then those that only config.json has.

    `more` are those of a tokenizer. Without those beyond config.json's `vocab_size`: of a
    vocabulary that was cut, some checkpoints name tokens that can no longer be sampled.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        config = read_json(path)
        if isinstance(text := config.get("text_config"), dict):  # of a model of more than text
            config = {**text, **{key: one for key, one in config.items() if one is not None}}
        value = config.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise CheckpointError(
                    f"{path}: eos_token_id is {shown(value)}; it must be a token id or a list "
                    "of them"
                )
            ids.append(token_id)
    size = config.get("vocab_size")
    end = size if isinstance(size, int) else _LONGEST_VOCABULARY
    return tuple(dict.fromkeys(token_id for token_id in (*ids, *more) if token_id < end))


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever is wrong
        raise CheckpointError(
            f"{path} cannot be read as a tokenizer: {error}; fetch the file again, or check that "
            "it is not a Git LFS pointer"
        ) from error


def _read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; special tokens of older folders are in special_tokens_map.json."""
    config = read_json(folder / "tokenizer_config.json")
    is_old = config.get(_ADDED) is None
    return {**config, **(read_json(folder / "special_tokens_map.json") if is_old else {})}


def _add_tokens(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Add the tokens that only the files beside tokenizer.json state, as transformers does.

    What is special there is special. Raises CheckpointError for tokens that are malformed, or that
    would not get the id that is stated.
    """
    config, file = _read_settings(folder), "tokenizer_config.json"
    try:
        if config.get(_ADDED) is not None:
            stated = {int(number): _token(one) for number, one in config[_ADDED].items()}
        else:
            file = "added_tokens.json"
            special = {_content(value) for value in config.values()}
            stated = {
                int(n): AddedToken(text, special=text in special, normalized=text not in special)
                for text, n in read_json(folder / file).items()
                if backend.token_to_id(text) is None
            }
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise CheckpointError(
            f"{folder / file}: the added tokens ({_ADDED}) cannot be read: {error}; fetch it again"
        ) from error
    known = backend.get_added_tokens_decoder()
    backend.add_tokens([stated[n] for n in sorted(stated) if repr(stated[n]) != repr(known.get(n))])
    for number, token in stated.items():
        if (own := backend.token_to_id(token.content)) != number:
            raise CheckpointError(
                f"{folder / file} gives {shown(token.content)} the id {number}, but tokenizer.json "
                f"gives it {own}; save the tokenizer again with `save_pretrained`, or remove the "
                "token there"
            )


def _token(entry: Mapping[str, Any]) -> AddedToken:
    # Of other keys the library prints.
    return AddedToken(entry["content"], **{name: entry[name] for name in _FLAGS if name in entry})


def _begin_with(backend: tokenizers.Tokenizer, bos: str | None) -> None:
    """Put this token before each text where tokenizer.json does not, as DeepSeek's do not."""
    bos_id = None if bos is None else backend.token_to_id(bos)
    if bos is None or bos_id is None or backend.encode("").ids[:1] == [bos_id]:
        return
    first = TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, bos_id)]
    )
    own = backend.post_processor
    backend.post_processor = first if own is None else processors.Sequence([own, first])


def _convert_with_transformers(folder: Path) -> tokenizers.Tokenizer:
    """The named route for folders without tokenizer.json: transformers converts what it knows."""
    from transformers import AutoTokenizer

    if "AutoTokenizer" in (read_json(folder / "tokenizer_config.json").get("auto_map") or {}):
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and its tokenizer is Python code of the checkpoint, "
            "which is not run; set `tokenizer` to a folder with a tokenizer.json"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
    except Exception as error:  # whatever transformers and the libraries beneath it may raise
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and transformers cannot convert what is there: "
            f"{error}; save the tokenizer with `save_pretrained`, which writes tokenizer.json"
        ) from error
    return backend


def _find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name: chat_template.jinja, else the template or templates of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": read_text(path)}
    template = config.get("chat_template")
    if not isinstance(template, list):
        return {"default": template} if isinstance(template, str) else {}
    try:
        return {entry["name"]: entry["template"] for entry in template}
    except (TypeError, LookupError) as error:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template is {shown(template)}; of a list "
            'each entry must be {"name": "...", "template": "..."}; fetch the file again'
        ) from error


def _check_messages(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    if not (
        isinstance(messages, Sequence)
        and messages
        and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in messages
        )
    ):
        raise InvalidPromptError(
            f"messages are {shown(messages)}; they must be one or more "
            '{"role": "user", "content": "..."}'
        )
    return [dict(message) for message in messages]


def _content(token: Any) -> str | None:
    """A special token's text: tokenizer_config.json has it bare or inside an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None
