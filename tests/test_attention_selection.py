"""Which attention backends are chosen, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from importlib.metadata import entry_points
from typing import Any

import pytest

from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.diagnostics.status import plugin_statuses, typical_requirements
from nanovllm_core.errors import ConfigError, PluginLoadError, UnsupportedError
from nanovllm_core.interfaces.attention import AttentionCapabilities, AttentionRequirements
from nanovllm_core.registry.discovery import install_command
from nanovllm_core.registry.manager import get_plugin_manager
from nanovllm_core.selection.attention import Selection, select_attention, unmet

Install = Callable[..., None]

ABLE = AttentionCapabilities(
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset({"float32", "bfloat16"}),
    head_sizes=frozenset({64, 128}),
    gqa=True,
    cuda_graphs="decode",
)
ASKED = AttentionRequirements(
    phase="decode",
    device="cuda",
    dtype="bfloat16",
    num_heads=8,
    num_kv_heads=2,
    head_size=64,
    compute_capability=(9, 0),
    cuda_graphs=True,
)


def test_a_backend_that_states_everything_asked_has_no_unmet_requirement() -> None:
    assert unmet(ABLE, ASKED) == []
    prompts = replace(ASKED, phase="prefill", device="cuda:1")
    assert unmet(ABLE, replace(prompts, cuda_graphs=False)) == []
    assert unmet(replace(ABLE, cuda_graphs="full"), prompts) == []
    assert unmet(ABLE, prompts) == ["its prefill cannot be captured in CUDA graphs"]
    assert unmet(replace(ABLE, head_sizes=None), replace(ASKED, head_size=7)) == []


UNMET: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"phases": frozenset({"prefill"})}, {}, "does not do decode, only prefill"),
    ({}, {"device": "mps"}, "does not run on mps, only on cpu, cuda"),
    ({}, {"dtype": "float16"}, "does not compute in float16, only in bfloat16, float32"),
    ({}, {"head_size": 80}, "has no head size 80, only 64, 128"),
    ({"head_sizes": frozenset({16, *range(32, 65)})}, {"head_size": 80},
     "has no head size 80, only 16, 32 to 64"),
    ({"min_compute_capability": (9, 0)}, {"compute_capability": (8, 6)},
     "needs compute capability 9.0, and this GPU has 8.6"),
    ({"max_compute_capability": (9, 0)}, {"compute_capability": (10, 0)},
     "stops at compute capability 9.0, and this GPU has 10.0"),
    ({"min_compute_capability": (8, 0)}, {"compute_capability": None},
     "depends on the GPU's compute capability, which is unknown"),
    ({"cuda_graphs": "none"}, {},
     "cannot be captured in CUDA graphs; set cuda_graphs.enforce_eager to run without"),
    ({"gqa": False}, {}, "needs as many KV heads as query heads (the model has 8 query and 2 "
     "KV heads)"),
    ({}, {"sliding_window": True}, "has no sliding window, and the model needs one"),
    ({}, {"soft_cap": True}, "has no logit soft cap, and the model needs one"),
    ({}, {"latent": True},
     "has no latent attention, and the model caches one row per token for it"),
    ({"latent": True, "cuda_graphs": "full"}, {"latent": True, "phase": "prefill"},
     "its run_prefill does not attend to latent rows, as captured prompts do"),
]  # fmt: skip
"""What a backend states otherwise than `ABLE`, what is asked otherwise than `ASKED`, the reason."""


@pytest.mark.parametrize(("able", "asked", "said"), UNMET)
def test_each_unmet_requirement_is_one_reason_with_value_and_limit(
    able: dict[str, Any], asked: dict[str, Any], said: str
) -> None:
    assert unmet(replace(ABLE, **able), replace(ASKED, **asked)) == [said]


def test_every_requirement_is_refused_in_one_of_these_ways() -> None:
    """A requirement that is added later needs a reason; block sizes are compared with layouts.

    A backend of latent attention that has no kernel for a size of values says so in its `check`.
    """
    stated = {"phases": "phase", "gqa": "num_kv_heads"}
    changed = {stated.get(name, name) for able, asked, _ in UNMET for name in (*able, *asked)}
    asked = {field.name for field in fields(AttentionRequirements)}
    assert asked - changed == {"num_heads", "block_size", "value_size"}


def test_what_concerns_gpus_is_not_asked_of_a_cpu() -> None:
    gpu_only = replace(ABLE, min_compute_capability=(9, 0), cuda_graphs="none")
    assert unmet(gpu_only, replace(ASKED, device="cpu", compute_capability=None)) == []


def test_a_compute_capability_within_its_bounds_is_met() -> None:
    bounded = replace(ABLE, min_compute_capability=(8, 0), max_compute_capability=(9, 0))
    assert unmet(bounded, ASKED) == []


SOURCE = """
from pydantic import BaseModel, ConfigDict
from nanovllm_core.registry.hookspecs import hookimpl
from nanovllm_core.interfaces.attention import AttentionCapabilities, KVLayout
from nanovllm_core.interfaces.specs import AttentionSpec

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    tile: int = 1

@hookimpl
def nanovllm_attention():
    return [AttentionSpec(
        name="NAME", impl="json:loads", contract=2, options=Options, rank=lambda requirements: RANK,
        capabilities=AttentionCapabilities(
            devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), gqa=True, MORE
        ),
        kv_layouts=lambda requirements, options: [KVLayout(name, n) for name, n in LAYOUTS],
        check=CHECK,
        provider=PROVIDER,
    )]
"""

Backend = Callable[..., None]


@pytest.fixture
def backend(install: Install) -> Backend:
    """Install a backend for CPUs and float32: `backend("fast", rank=3, layouts=[("NPKD", 16)])`."""

    def make(
        name: str,
        rank: int | str = 0,
        layouts: str = '[("NPKD", 16)]',
        check: str = "lambda requirements, options: []",
        provider: str = "None",
        more: str = "",
    ) -> None:
        source = SOURCE
        parts = {"NAME": name, "RANK": str(rank), "LAYOUTS": layouts, "CHECK": check}
        for key, value in (parts | {"PROVIDER": provider, "MORE": more}).items():
            source = source.replace(key, value)
        module = f"fake_attention_{name}"
        install(f"fake-{name}", {"nanovllm.attention": {name: module}}, {module: source})

    return make


def select(
    attention: object, *others: dict[str, Any], disable: Iterable[str] = (), **asked: Any
) -> Selection:
    """Choose among the fake backends only. Each of `others` is what one more layer asks."""
    found = entry_points(group="nanovllm.attention")
    fakes = [entry for entry in found if entry.dist and entry.dist.name.startswith("fake-")]
    manager = get_plugin_manager(disable, fakes)
    requirements = {"device": "cpu", "dtype": "float32", "cuda_graphs": False} | asked
    return select_attention(
        manager,
        EngineConfig(model="m", attention=attention).attention,
        *(
            {
                replace(ASKED, phase=phase, **requirements, **changes): [layer]
                for layer, changes in enumerate(({}, *others))
            }
            for phase in ("prefill", "decode")
        ),
    )


def test_a_backend_must_serve_every_layer(backend: Backend) -> None:
    """A reason that is not all layers' names those that have it."""
    backend("whole", rank=2)
    with pytest.raises(UnsupportedError, match=r"'whole'.*: layers 1: has no sliding window"):
        select("whole", {"sliding_window": True})
    with pytest.raises(
        UnsupportedError, match=r"'whole'.*: has no logit soft cap, .* needs one\. "
    ):
        select("whole", {"num_heads": 4}, soft_cap=True)
    backend("able", rank=1, more="sliding_window=True, cuda_graphs='full'")
    selection = select("auto", {"sliding_window": True}, {"num_heads": 4})
    assert selection.prefill.name == selection.decode.name == "able"
    assert any("not whole: layers 1: has no sliding" in line for line in selection.report)


def test_layers_share_a_layout_that_suits_all_of_them(backend: Backend) -> None:
    """And the rank is the lowest that one of them gives."""
    backend(
        "by_heads",
        rank="requirements.num_heads",
        layouts="[('NPKD', requirements.num_heads), ('NPKD', 64)]",
    )
    alone, both = select("by_heads"), select("by_heads", {"num_heads": 16})
    assert (alone.layout.block_multiple, alone.decode.rank) == (8, 8)
    assert (both.layout.block_multiple, both.decode.rank) == (64, 8)


@pytest.mark.parametrize(
    ("more", "asked", "said"),
    [
        ("", {"device": "cuda"}, "does not run on cuda"),
        ("", {"dtype": "bfloat16"}, "does not compute in bfloat16"),
        ("", {"sliding_window": True}, "has no sliding window"),
        ("", {"soft_cap": True}, "has no logit soft cap"),
        ("head_sizes=frozenset({128})", {}, "has no head size 64"),
        ('phases=frozenset({"decode"})', {}, "does not do prefill"),
    ],
)
def test_what_is_not_declared_is_refused_however_willing_the_plugin_is(
    backend: Backend, more: str, asked: dict[str, Any], said: str
) -> None:
    """Its `check` is not asked: it may rely on what its capabilities promise."""
    backend("willing", check="lambda requirements, options: 1 / 0", more=more)
    with pytest.raises(UnsupportedError, match=f"'willing'.* cannot serve prefill on .*: {said}"):
        select("willing", **asked)


def test_auto_takes_the_highest_rank_and_says_why_each_other_one_lost(
    backend: Backend, install: Install
) -> None:
    backend("slow", rank=1)
    backend("fast", rank=5, provider="lambda options: f'tiles of {options.tile}'")
    backend("huge", rank=9, more="head_sizes=frozenset({512})")
    backend("moody", rank=9, check="lambda requirements, options: ['it is Friday']")
    install(
        "fake-broken", {"nanovllm.attention": {"broken": "fake_broken"}}, {"fake_broken": "1/0"}
    )
    selection = select("auto")
    assert selection.prefill.name == selection.decode.name == "fast"
    report = "\n".join(selection.report)
    assert "decode: fast 1.2.3 (tiles of 1)" in report
    assert "not slow: it can serve, but its rank 1 is not above fast's 5" in report
    assert "not huge: has no head size 64, only 512" in report
    assert "not moody: it is Friday" in report
    assert "not broken: attention 'broken' of fake-broken 1.2.3" in report
    assert "ZeroDivisionError" in report


def test_auto_chooses_for_each_phase(backend: Backend) -> None:
    backend("reader", rank=5, more='phases=frozenset({"prefill"})')
    backend("writer", rank=1)
    selection = select("auto")
    assert (selection.prefill.name, selection.decode.name) == ("reader", "writer")


def test_auto_prefers_by_name_where_ranks_are_equal(backend: Backend) -> None:
    backend("b")
    backend("a")
    assert select("auto").decode.name == "a"


def test_auto_with_nothing_installed_says_what_to_install() -> None:
    with pytest.raises(UnsupportedError) as caught:
        select("auto")
    assert "None is installed" in str(caught.value)
    assert install_command("attention", "sdpa") in str(caught.value)


def test_auto_with_nothing_able_lists_every_reason(backend: Backend) -> None:
    backend("fast")
    with pytest.raises(UnsupportedError) as caught:
        select("auto", dtype="float16")
    assert caught.value.reasons == ("fast: does not compute in float16, only in float32",)
    assert caught.value.reasons[0] in str(caught.value)


def test_a_named_backend_is_taken_whatever_its_rank(backend: Backend) -> None:
    backend("slow", rank=1)
    backend("fast", rank=5)
    selection = select({"backend": "slow", "options": {"tile": 4}})
    assert selection.decode.name == "slow"
    assert selection.decode.resolved.options.model_dump() == {"tile": 4}


def test_a_named_backend_that_cannot_serve_is_an_error_with_the_alternatives(
    backend: Backend,
) -> None:
    backend("moody", check="lambda requirements, options: ['it is Friday', 'it rains']")
    backend("steady")
    with pytest.raises(UnsupportedError) as caught:
        select("moody")
    assert (
        "cannot serve prefill on cpu in float32: it is Friday; it rains. These can: steady"
        in str(caught.value)
    )
    assert caught.value.reasons == ("it is Friday", "it rains")


def test_without_an_alternative_the_error_says_what_to_install(backend: Backend) -> None:
    backend("moody", check="lambda requirements, options: ['it is Friday']")
    with pytest.raises(UnsupportedError, match=r"No other installed one can; pip install"):
        select("moody")


def test_the_check_sees_the_validated_options(backend: Backend) -> None:
    backend("x", check="lambda requirements, options: ['big'] if options.tile > 3 else []")
    assert select({"backend": "x", "options": {"tile": 3}}).decode.name == "x"
    with pytest.raises(UnsupportedError, match="big"):
        select({"backend": "x", "options": {"tile": 4}})


def test_a_wrong_option_names_the_phase_only_in_a_pair(backend: Backend) -> None:
    backend("x")
    with pytest.raises(ConfigError, match=r"^attention\.options\.tle: unknown option"):
        select({"backend": "x", "options": {"tle": 1}})
    with pytest.raises(ConfigError, match=r"^attention\.decode\.options\.tle: .* mean tile\?"):
        select({"prefill": "x", "decode": {"backend": "x", "options": {"tle": 1}}})


def test_a_backend_that_fails_while_asked_is_named(backend: Backend) -> None:
    backend("x", check="lambda requirements, options: 1/0")
    with pytest.raises(PluginLoadError, match=r"'x' \(fake-x 1\.2\.3\) failed .*ZeroDivisionError"):
        select("x")


@pytest.mark.parametrize(
    ("layouts", "block_size"),
    [("[('NPKD', 1)]", 16), ("[('NPKD', 16)]", 16), ("[('NPKD', 64), ('NPKD', 16)]", 64),
     ("[('NPKD', 256)]", 256), ("[('NPKD', 8)]", 16)],
)  # fmt: skip
def test_the_block_is_the_first_layouts_multiple_and_16_at_least(
    backend: Backend, layouts: str, block_size: int
) -> None:
    backend("x", layouts=layouts)
    assert select("x").block_size == block_size


@pytest.mark.parametrize(
    ("reader", "block_size"),
    [("[('NPKD', 128), ('NPKD', 16)]", 128), ("[('NPKD', 256)]", 256), ("[('NPKD', 16)]", 16)],
)
def test_a_block_that_both_of_a_pair_list_comes_first(
    backend: Backend, reader: str, block_size: int
) -> None:
    """FlashAttention-4 with triton: 128; torch's varlen with triton: 256; sdpa with it: 16."""
    backend("reader", layouts=reader)
    backend("writer", layouts="[('NPKD', 256), ('NPKD', 128), ('NPKD', 16)]")
    assert select({"prefill": "reader", "decode": "writer"}).block_size == block_size


def test_a_given_block_size_is_kept(backend: Backend) -> None:
    backend("x", layouts="[('NPKD', 128), ('NPKD', 16)]")
    selection = select("x", block_size=64)
    assert (selection.block_size, selection.layout.block_multiple) == (64, 16)


def test_a_block_size_that_a_backend_cannot_use_is_refused_with_the_numbers(
    backend: Backend,
) -> None:
    backend("x", layouts="[('NPKD', 64), ('NPKD', 128)]")
    with pytest.raises(UnsupportedError, match="block_size 32, only multiples of 64, 128"):
        select("x", block_size=32)


def test_a_block_size_that_suits_each_suits_both(backend: Backend) -> None:
    """Block multiples are powers of two, so that the larger of two suits both."""
    backend("reader", layouts="[('NPKD', 16), ('NPKD', 128)]")
    backend("writer", layouts="[('NPKD', 256), ('NPKD', 64)]")
    pair = {"prefill": "reader", "decode": "writer"}
    assert (select(pair).block_size, select(pair, block_size=64).block_size) == (256, 64)
    with pytest.raises(UnsupportedError, match="block_size 32, only multiples of 64, 256"):
        select(pair, block_size=32)


WRONG_ANSWERS = [
    ({"rank": "None"}, "rank gave None, not an integer"),
    ({"rank": "'high'"}, "rank gave 'high', not an integer"),
    ({"rank": "float('nan')"}, "rank gave nan, not an integer"),
    ({"rank": "True"}, "rank gave True, not an integer"),
    ({"check": "lambda requirements, options: [1]"}, "check gave [1], not a list of texts"),
    ({"check": "lambda requirements, options: 'never'"}, "check gave 'never', not a list of texts"),
    ({"check": "lambda requirements, options: None"}, "check gave None, not a list of texts"),
    ({"layouts": "[('banana', 16)]"}, "name 'banana' of a KVLayout is none of NPKD"),
    *(
        ({"layouts": f"[('NPKD', {n})]"}, f"block_multiple {n} of a KVLayout is none of 1, 2, 4, 8")
        for n in ("-16", "0", "20", "512", "'16'", "True")
    ),
    ({"layouts": "[]"}, "kv_layouts gave [], not a list of one KVLayout or more"),
    ({"layouts": "5"}, "failed while it was asked what it supports: TypeError"),
    ({"provider": "lambda options: 1 / 0"}, "failed while it was asked what it supports: ZeroD"),
]
"""What a plugin states, and what is said of it."""


@pytest.mark.parametrize(("stated", "said"), WRONG_ANSWERS)
def test_a_wrong_answer_is_an_error_where_the_backend_is_named_and_it_is_broken_in_a_listing(
    backend: Backend, stated: dict[str, str], said: str
) -> None:
    backend("odd", **stated)
    with pytest.raises(PluginLoadError) as caught:
        select("odd")
    assert str(caught.value).startswith("attention 'odd' (fake-odd 1.2.3)")
    assert said in str(caught.value)
    statuses = plugin_statuses(get_plugin_manager(), typical_requirements("cpu", None), "attention")
    [status] = [status for status in statuses if status.plugin.name == "odd"]
    assert status.state == "broken"
    assert said in status.reasons[0]


@pytest.mark.parametrize(("stated", "said"), WRONG_ANSWERS[:-1])
def test_auto_passes_over_a_backend_that_answers_wrongly(
    backend: Backend, stated: dict[str, str], said: str
) -> None:
    backend("odd", **({"rank": "9"} | stated))
    backend("sound", rank=1)
    selection = select("auto")
    assert selection.decode.name == "sound"
    [line] = [line for line in selection.report if line.startswith("attention auto, decode: not")]
    assert line.startswith("attention auto, decode: not odd: attention 'odd' (fake-odd 1.2.3)")
    assert said in line


def test_layouts_of_another_type_are_told(backend: Backend, install: Install) -> None:
    """A list of the names in the place of KVLayout objects."""
    source = SOURCE.replace("[KVLayout(name, n) for name, n in LAYOUTS]", "['NPKD']")
    for key, value in {"NAME": "odd", "RANK": "0", "CHECK": "lambda requirements, options: []",
                       "PROVIDER": "None", "MORE": ""}.items():  # fmt: skip
        source = source.replace(key, value)
    install("fake-odd", {"nanovllm.attention": {"odd": "fake_names"}}, {"fake_names": source})
    with pytest.raises(PluginLoadError, match=r"'odd' .*: kv_layouts gave \['NPKD'\], not a list"):
        select("odd")


def test_a_backend_that_refuses_its_options_is_no_alternative_to_itself(backend: Backend) -> None:
    """Asked with its default options it could serve."""
    backend("x", check="lambda requirements, options: ['big'] if options.tile > 3 else []")
    with pytest.raises(UnsupportedError, match=r"big\. No other installed one can"):
        select({"backend": "x", "options": {"tile": 4}})
    backend("steady")
    with pytest.raises(UnsupportedError, match=r"big\. These can: steady$"):
        select({"backend": "x", "options": {"tile": 4}})


def test_auto_with_all_disabled_says_so_and_names_them(backend: Backend) -> None:
    backend("a")
    backend("b")
    with pytest.raises(UnsupportedError) as caught:
        select("auto", disable=["a", "attention:b"])
    assert str(caught.value).endswith(
        "All are disabled; of those disabled, take one out of plugins.disable: a, b"
    )
    with pytest.raises(UnsupportedError, match=r"^no .* a: does not .*; of those disabled, .*: b"):
        select("auto", disable=["b"], dtype="float16")
