"""The front door: what `LLM` takes, gives and promises."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nanovllm_core
from nanovllm_core import LLM, SamplingParams
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.config.sources import load_config
from nanovllm_core.errors import (
    CheckpointError,
    EngineClosedError,
    InvalidPromptError,
    InvalidSamplingError,
    RequestTooLongError,
)

from .tiny import Reference, open_tiny, write_checkpoint

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5] * 20]


def greedy(max_tokens: int = 6, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[list[int]]:
    return [reference.tokens(prompt, 6) for prompt in PROMPTS]


# -- prompts in, outputs out ----------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts(
    shared_engine: LLM, expected: list[list[int]]
) -> None:
    """Whatever finishes first: here the later prompts ask for less."""
    params = [greedy(6), greedy(3), greedy(1)]
    outputs = shared_engine.generate(PROMPTS, params)
    assert [output.token_ids for output in outputs] == [
        expected[0],
        expected[1][:3],
        expected[2][:1],
    ]
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert all(output.finished for output in outputs)


def test_prompts_are_read_without_collections(
    shared_engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would look at every id of the prompts before; behind them they begin again."""
    enabled = []
    encode = shared_engine._encode

    def look(prompt: Any) -> list[int]:
        enabled.append(gc.isenabled())
        return encode(prompt)

    monkeypatch.setattr(shared_engine, "_encode", look)
    assert gc.isenabled()
    with pytest.raises(InvalidPromptError):
        shared_engine.generate([*PROMPTS, []], greedy(), use_tqdm=False)
    assert enabled == [False] * 4
    assert gc.isenabled()


def test_samples_follow_their_prompt(shared_engine: LLM) -> None:
    outputs = shared_engine.generate(PROMPTS[:2], SamplingParams(n=3, max_tokens=2))
    assert [output.index for output in outputs] == [0, 1, 2, 0, 1, 2]
    assert [output.prompt_token_ids for output in outputs] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3


def test_one_prompt_needs_no_list(shared_engine: LLM, expected: list[list[int]]) -> None:
    """A flat list of ids, numpy's among them, is one prompt."""
    for prompt in (PROMPTS[0], tuple(PROMPTS[0]), list(np.array(PROMPTS[0]))):
        (output,) = shared_engine.generate(prompt, greedy())
        assert output.token_ids == expected[0]
    assert [o.token_ids for o in shared_engine.generate([PROMPTS[0]], greedy())] == [expected[0]]


def test_no_prompts_are_no_outputs(shared_engine: LLM) -> None:
    assert shared_engine.generate([]) == []


def test_outputs_answer_as_nano_vllms_do(demo: LLM) -> None:
    """`output["text"]` and `output["token_ids"]`; no other key."""
    outputs = demo.generate(["Once upon a time"], greedy(8), use_tqdm=False)
    assert outputs[0]["text"] == outputs[0].text == demo.tokenizer.decode(outputs[0].token_ids)
    assert outputs[0]["token_ids"] == outputs[0].token_ids
    with pytest.raises(KeyError, match="answers 'text' and 'token_ids'"):
        outputs[0]["prompt"]


def test_a_script_for_nano_vllm_runs_with_only_its_import_changed(tiny: Path) -> None:
    """Its flat keywords, its call, its names of results."""
    llm = LLM(
        str(tiny), enforce_eager=True, max_model_len=64, tensor_parallel_size=1, max_num_seqs=4
    )
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=5)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [5, 5, 5]  # type: ignore[arg-type]
    llm.exit()


def test_chat_answers_conversations_in_order(demo: LLM) -> None:
    questions = ["What is 12 + 30?", "Add 15 and 2."]
    many = [[{"role": "user", "content": question}] for question in questions]
    assert [output.text for output in demo.chat(many, greedy(16))] == ["42", "17"]
    assert [output.text for output in demo.chat(many[0], greedy(16))] == ["42"]


# -- streams --------------------------------------------------------------------------------------


def test_template_variables_come_from_the_configuration_and_a_call_overrides_them(
    tmp_path: Path,
) -> None:
    """In `chat` and `stream`; a prompt that no template is applied to refuses them."""
    from nanovllm_checkpoint_demo.plugin import FOLDER

    folder = Path(shutil.copytree(FOLDER, tmp_path / "copy"))
    template = "{{ messages[0].content }}{% if enable_thinking is false %} no{% endif %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    messages, off, on = [{"role": "user", "content": "a"}], False, True
    with open_tiny(folder, chat_template_kwargs={"enable_thinking": off}) as llm:

        def prompts(**call: Any) -> list[str]:
            first = llm.chat(messages, greedy(1), **call)[0]
            second = next(llm.stream(messages, greedy(1), **call))
            return [llm.tokenizer.decode(one.prompt_token_ids) for one in (first, second)]

        assert prompts() == ["a no"] * 2
        assert prompts(chat_template_kwargs={"enable_thinking": on}) == ["a"] * 2
        with pytest.raises(InvalidPromptError, match="the prompt is no conversation"):
            next(llm.stream("a", chat_template_kwargs={"enable_thinking": on}))


def test_a_stream_gives_every_token_as_it_comes(
    shared_engine: LLM, expected: list[list[int]]
) -> None:
    outputs = list(shared_engine.stream(PROMPTS[0], greedy()))
    assert [output.new_token_ids for output in outputs] == [[token] for token in expected[0]]
    assert [output.finished for output in outputs] == [False] * 5 + [True]


def test_a_stream_takes_text_and_conversations(demo: LLM) -> None:
    asked = [{"role": "user", "content": "What is 12 + 30?"}]
    assert "".join(part.new_text for part in demo.stream(asked, greedy(16))) == "42"
    text = demo.generate("Once upon", greedy(8))[0].text
    assert "".join(part.new_text for part in demo.stream("Once upon", greedy(8))) == text


def test_leaving_a_stream_early_aborts_its_request(shared_engine: LLM) -> None:
    """Its row and its blocks are free at once."""
    total = shared_engine.stats.free_blocks
    for output in shared_engine.stream(PROMPTS[2], SamplingParams(max_tokens=200, n=2)):
        assert shared_engine.stats.running == 1 or output.index in (0, 1)
        if len(output.token_ids) == 3:
            break
    assert shared_engine.stats.running == shared_engine.stats.waiting == 0
    assert shared_engine.stats.free_blocks == total


def test_streams_and_batches_on_one_engine_do_not_take_each_others_outputs(
    shared_engine: LLM, expected: list[list[int]]
) -> None:
    """Two streams taken in turn, and a whole `generate` in between."""
    first = shared_engine.stream(PROMPTS[0], greedy())
    second = shared_engine.stream(PROMPTS[1], greedy())
    got = [next(first).new_token_ids, next(second).new_token_ids]
    assert [o.token_ids for o in shared_engine.generate(PROMPTS, greedy())] == expected
    rest = [
        [token for part in stream for token in part.new_token_ids] for stream in (first, second)
    ]
    assert [got[0] + rest[0], got[1] + rest[1]] == expected[:2]


def test_a_stream_misses_nothing_while_its_caller_does_other_things(demo: LLM) -> None:
    """Its tokens wait, each an output of its own that holds all up to it."""
    whole = demo.generate("Once upon", greedy(8))[0]
    stream = demo.stream("Once upon", greedy(8))
    parts = [next(stream)]
    demo.generate("a long time ago", SamplingParams(max_tokens=40, ignore_eos=True))
    parts += stream
    assert [part.token_ids for part in parts] == [whole.token_ids[:i] for i in range(1, 9)]
    assert [whole.text.startswith(part.text) for part in parts] == [True] * 8
    assert "".join(part.new_text for part in parts) == parts[-1].text == whole.text
    assert [token for part in parts for token in part.new_token_ids] == whole.token_ids


# -- open and closed ------------------------------------------------------------------------------


def test_the_context_manager_closes_and_closing_again_is_fine(tiny: Path) -> None:
    with open_tiny(tiny) as llm:
        stream = llm.stream(PROMPTS[0], greedy())
        next(stream)
    llm.close()
    llm.exit()
    with pytest.raises(EngineClosedError, match="this LLM is closed; create a new one"):
        llm.generate(PROMPTS)
    with pytest.raises(EngineClosedError):
        next(llm.stream(PROMPTS[0]))
    with pytest.raises(EngineClosedError):
        next(stream)


def test_an_error_inside_the_block_closes_too(tiny: Path) -> None:
    with pytest.raises(ZeroDivisionError), open_tiny(tiny) as llm:
        _ = 1 / 0
    with pytest.raises(EngineClosedError):
        llm.generate(PROMPTS)


def test_two_engines_in_one_process_do_not_know_of_each_other(tmp_path: Path) -> None:
    """Two checkpoints, two block sizes, steps taken in turn; closing one leaves the other."""
    folders = [write_checkpoint(tmp_path / str(seed), seed) for seed in (1, 2)]
    wanted = [Reference.of(folder).tokens(PROMPTS[2], 8) for folder in folders]
    assert wanted[0] != wanted[1]
    with open_tiny(folders[0]) as one, open_tiny(folders[1], cache={"block_size": 32}) as two:
        streams = [llm.stream(PROMPTS[2], greedy(8)) for llm in (one, two)]
        got: list[list[int]] = [[], []]
        for outputs in zip(*streams, strict=True):
            for ids, output in zip(got, outputs, strict=True):
                ids += output.new_token_ids
        assert got == wanted
        one.close()
        assert two.generate([PROMPTS[2]], greedy(8))[0].token_ids == wanted[1]


def test_a_configuration_that_is_whole_is_taken_as_it_is(
    tiny: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    """From a YAML file, with keywords above it; and `from_config`."""
    file = tmp_path / "engine.yaml"
    file.write_text("device: cpu\nattention: sdpa\nlimits: {max_model_len: 64, max_num_seqs: 2}\n")
    with LLM(str(tiny), config_file=str(file), max_num_seqs=3) as llm:
        assert llm.config.limits.max_model_len == llm.info.max_model_len == 64
        assert llm.config.limits.max_num_seqs == llm.info.bucket_sizes[-1] == 3
        assert [output.token_ids for output in llm.generate(PROMPTS, greedy())] == expected
    config = load_config(str(tiny), file=file)
    assert isinstance(config, EngineConfig)
    with LLM.from_config(config) as llm:
        assert llm.config is config


# -- what it is made of ---------------------------------------------------------------------------


def test_without_a_tokenizer_ids_are_served_and_text_is_refused(shared_engine: LLM) -> None:
    assert shared_engine.generate([PROMPTS[0]], greedy(2))[0].text == ""
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*pass token ids, or set"):
        shared_engine.generate("text")
    with pytest.raises(InvalidSamplingError, match="no detokenizer; give one, or use stop_token"):
        shared_engine.generate([PROMPTS[0]], greedy(2, stop="x"))


def test_a_tokenizer_from_elsewhere_leaves_the_ending_ids_to_the_checkpoint(
    demo: LLM, tmp_path: Path
) -> None:
    """Weights in one folder, tokenizer in another: ids of both end a text."""
    source = demo.tokenizer.folder
    weights, words = tmp_path / "weights", tmp_path / "words"
    for folder in (weights, words):
        folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, weights)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, words)
    text = "Once upon a time"
    ids = demo.generate(text, greedy(12, ignore_eos=True))[0].token_ids
    (weights / "generation_config.json").write_text(f'{{"eos_token_id": {ids[4]}}}')
    with open_tiny(weights, tokenizer=str(words)) as llm:
        story = llm.generate(text, greedy(12))[0]
        assert story.token_ids == ids[: ids.index(ids[4]) + 1]
        assert (story.finish_reason, story.stop_reason) == ("stop", ids[4])
        (answer,) = llm.chat([{"role": "user", "content": "What is 12 + 30?"}], greedy(16))
        assert answer.stop_reason in llm.tokenizer.eos_token_ids


def test_forgetting_the_prefix_cache_makes_the_next_run_compute_again(tiny: Path) -> None:
    prompt = [[7] * 40]
    with open_tiny(tiny) as llm:
        llm.generate(prompt, greedy())
        assert llm.generate(prompt, greedy())[0].num_cached_tokens == 32
        llm.reset_prefix_cache()
        assert llm.generate(prompt, greedy())[0].num_cached_tokens == 0


def test_stats_count_what_was_done(tiny: Path) -> None:
    with open_tiny(tiny) as llm:
        llm.generate(PROMPTS, greedy(5))
        stats = llm.stats
    assert stats.output_tokens == 15
    assert stats.steps >= 5
    assert stats.host_seconds > 0


# -- one bad request harms nobody -----------------------------------------------------------------


@pytest.fixture
def busy(tiny: Path, expected: list[list[int]]) -> Iterator[LLM]:
    """An engine with a stream under way, which must end as if nothing had happened."""
    with open_tiny(tiny, max_model_len=64) as llm:
        stream = llm.stream(PROMPTS[0], greedy(60, ignore_eos=True))
        tokens = next(stream).new_token_ids
        yield llm
        tokens += [output.new_token_ids[0] for output in stream]
        assert len(tokens) == 60
        assert tokens[:6] == expected[0]
        assert llm.stats.running == llm.stats.waiting == 0


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], InvalidPromptError, "prompt is empty"),
        ([1, -1], InvalidPromptError, r"token id -1, outside the vocabulary of 97 ids \(0 to 96\)"),
        ([97], InvalidPromptError, "token id 97, outside the vocabulary"),
        ([1, 2**70], InvalidPromptError, f"token id {2**70}, outside the vocabulary of 97 ids"),
        ([1, 2.5], InvalidPromptError, "whole token ids; got float 2.5 at index 1"),
        ([True, False], InvalidPromptError, "whole token ids; got bool True at index 0"),
        ([5, "a"], InvalidPromptError, "whole token ids; got str 'a' at index 1"),
        ([1, [2, 3]], InvalidPromptError, r"flat list of .*; got list \[2, 3\] at index 1"),
        (torch.tensor([[1, 2, 3]]), InvalidPromptError, r"got Tensor tensor\(.* at index 0"),
        (torch.tensor([0.5]), InvalidPromptError, r"got Tensor tensor\(0.5.* at index 0"),
        (np.ones((1, 2), np.int64), InvalidPromptError, r"got ndarray array\(.* at index 0"),
        (2.5, InvalidPromptError, "got float 2.5"),
        (None, InvalidPromptError, "got NoneType None"),
        ({"prompt": "hello"}, InvalidPromptError, "text or a list of token ids; got dict"),
        ([1] * 64, RequestTooLongError, "64 tokens; max_model_len is 64"),
        ([1] * 60, RequestTooLongError, "60 prompt tokens and max_tokens=6 make 66"),
    ],
    ids=repr,
)
def test_a_bad_prompt_is_refused_before_any_is_run(
    prompt: object, error: type[Exception], message: str, busy: LLM
) -> None:
    """The good prompts before it are not run either, and other requests go on.

    The error says which of the prompts it is.
    """
    with pytest.raises(error, match=r"^prompts\[1\]: .*" + message):
        busy.generate([PROMPTS[0], prompt], greedy())  # type: ignore[arg-type]  # on purpose
    stats = busy.stats
    assert stats.waiting == 0
    assert stats.output_tokens <= 60, "the stream's alone"
    assert stats.running <= 1


def test_a_refused_batch_leaves_no_trace(tiny: Path) -> None:
    """Its good prompts are not counted, and take no seed from the requests behind them."""
    texts = []
    for refused in (False, True):
        with open_tiny(tiny) as llm:
            if refused:
                with pytest.raises(RequestTooLongError):
                    llm.generate([[5], [6], [7] * 500], greedy(), use_tqdm=False)
                assert llm.stats.finished == 0
            params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
            texts.append(llm.generate([[1, 2]], params, use_tqdm=False)[0].token_ids)
    assert texts[0] == texts[1]


def test_an_error_of_the_only_prompt_needs_no_number(shared_engine: LLM) -> None:
    with pytest.raises(InvalidPromptError, match=r"^the prompt is empty"):
        shared_engine.generate([[]])


def test_bytes_are_not_taken_for_token_ids(shared_engine: LLM) -> None:
    """Each of them is an integer, and the text would be about something else."""
    with pytest.raises(InvalidPromptError, match=r"a prompt is text or .*got bytes b'abc'"):
        shared_engine.generate([PROMPTS[0], b"abc"])  # type: ignore[list-item]


def test_something_that_is_no_prompt_is_refused(shared_engine: LLM) -> None:
    for prompts in (5, None, {1, 2}, np.array([1, 2]), b"abc", bytearray(b"abc")):
        with pytest.raises(InvalidPromptError, match="expected text, a list of token ids or"):
            shared_engine.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(InvalidPromptError, match="2 sampling_params for 1 prompts"):
        shared_engine.generate([PROMPTS[0]], [greedy(), greedy()])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user"}], "must be one or more"),
        ([{"role": "user", "content": 5}], "must be one or more"),
        ([[]], "must be one or more"),
        ("hello", "expected a list of messages .*got str 'hello'"),
        ({"role": "user", "content": "x"}, "expected a list of messages .*got dict"),
        (5, "expected a list of messages .*got int 5"),
        (None, "expected a list of messages .*got NoneType"),
    ],
    ids=repr,
)
def test_a_bad_conversation_is_refused(messages: object, message: str, demo: LLM) -> None:
    with pytest.raises(InvalidPromptError, match=message):
        demo.chat(messages, greedy())  # type: ignore[arg-type]


def test_a_bad_conversation_among_others_is_named(demo: LLM) -> None:
    good = [{"role": "user", "content": "hello"}]
    with pytest.raises(InvalidPromptError, match=r"^conversations\[1\]: .*must be one or more"):
        demo.chat([good, [{"role": "user"}]], greedy())  # type: ignore[list-item]


def test_parameters_that_all_share_are_no_prompts_fault(shared_engine: LLM) -> None:
    """And those of each are named by the prompt's place."""
    bad: Any = {"temperature": 0.5}
    with pytest.raises(InvalidSamplingError, match=r"^expected SamplingParams"):
        shared_engine.generate([[1], [2]], bad)
    with pytest.raises(InvalidSamplingError, match=r"^prompts\[1\]: expected SamplingParams"):
        shared_engine.generate([[1], [2]], [greedy(), bad])


@pytest.mark.parametrize("params", [{"temperature": 0.5}, [{"temperature": 0.5}]], ids=str)
def test_parameters_that_are_none_are_refused(shared_engine: LLM, params: object) -> None:
    """A dict is easily given in their place; the error says what is wanted."""
    with pytest.raises(InvalidSamplingError, match="expected SamplingParams, got dict"):
        shared_engine.generate([[1]], params)  # type: ignore[arg-type]


def test_a_stream_of_something_that_is_no_prompt_is_refused(shared_engine: LLM) -> None:
    with pytest.raises(InvalidPromptError, match="text or a list of token ids; got int 5"):
        next(shared_engine.stream(5))  # type: ignore[arg-type]
    with pytest.raises(InvalidSamplingError, match="expected SamplingParams, got dict"):
        next(shared_engine.stream([1], {"top_k": 3}))  # type: ignore[arg-type]


def test_an_empty_text_is_refused(demo: LLM) -> None:
    with pytest.raises(InvalidPromptError, match="empty"):
        demo.generate("", greedy())
    with pytest.raises(InvalidPromptError, match="empty"):
        next(demo.stream("", greedy()))


def test_the_public_door_is_importable_from_the_package() -> None:
    assert nanovllm_core.LLM is LLM
    assert nanovllm_core.SamplingParams is SamplingParams
