"""A sampler and a kernel set of other distributions take the place of the core's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nanovllm_core import SamplingParams
from nanovllm_core.config.choices import SamplerSettings
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.errors import ConfigError, PluginNotFoundError, UnsupportedError
from nanovllm_core.registry.manager import get_plugin_manager
from nanovllm_core.selection.decisions import select_sampler

from .tiny import Reference, open_tiny

Install = Callable[..., None]
PROMPT = [5, 17, 3, 60, 41, 8, 8, 90]

SAMPLER = """
import torch
from nanovllm_core.api import Sampler, SamplerSpec, hookimpl

CALLS = []

class SecondBest(Sampler):
    "Takes the second likeliest id, whatever the temperature."

    def sample(self, logits_BV, rows_B, temperature_R, seed_R, output_index_B, out_B, skip):
        CALLS.append(len(rows_B))
        ids_B = logits_BV.float().topk(2, dim=1).indices[:, 1].int()
        out_B.copy_(torch.where(rows_B < 0, -1, ids_B))

@hookimpl
def nanovllm_samplers():
    return [SamplerSpec(name="second", impl="second_best:SecondBest", contract=1,
                        devices=frozenset({"cpu"}))]
"""

KERNELS = """
from nanovllm_core.api import KernelSetSpec, hookimpl
from nanovllm_core.kernels import TorchKernels

class Counting(TorchKernels):
    calls = 0

    def norm_linear(self, *args):
        Counting.calls += 1
        return super().norm_linear(*args)

@hookimpl
def nanovllm_kernels():
    return [KernelSetSpec(name="counting", impl="counting_kernels:Counting", contract=4,
                          devices=frozenset({"cpu"}))]
"""


ATTENTION = """
from dataclasses import replace
from nanovllm_attention_sdpa.backend import SdpaAttention
from nanovllm_attention_sdpa import plugin
from nanovllm_core.api import hookimpl

class Slipping(SdpaAttention):
    def run_decode(self, *args):
        raise RuntimeError("a slip")

@hookimpl
def nanovllm_attention():
    return [replace(one, name="slipping", impl=__name__ + ":Slipping")
            for one in plugin.nanovllm_attention()]
"""


@pytest.fixture
def parts(install: Install) -> None:
    install("nanovllm-second", {"nanovllm.samplers": {"second": "second_best"}},
            {"second_best": SAMPLER})  # fmt: skip
    install("nanovllm-counting", {"nanovllm.kernels": {"counting": "counting_kernels"}},
            {"counting_kernels": KERNELS})  # fmt: skip


@pytest.mark.usefixtures("parts")
def test_a_sampler_that_is_named_chooses_every_token(tiny: Path, reference: Reference) -> None:
    """In decode steps, in steps with prompts, and in the tail of rows that ask for more."""
    ids = list(PROMPT)
    for _ in range(6):
        ids.append(int(reference.logits(ids)[-1].topk(2).indices[1]))
    expected = ids[len(PROMPT) :]
    params = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=logprobs)
        for logprobs in (None, 1)
    ]
    with open_tiny(tiny, sampler="second") as llm:
        for one in params:
            [output] = llm.generate([PROMPT], one)
            assert output.token_ids == expected
    assert sys.modules["second_best"].CALLS


@pytest.mark.usefixtures("parts")
def test_a_kernel_set_that_is_named_is_what_the_layers_run_on(
    tiny: Path, reference: Reference
) -> None:
    with open_tiny(tiny, kernels="counting") as llm:
        [output] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4))
    assert output.token_ids == reference.tokens(PROMPT, 4)
    assert sys.modules["counting_kernels"].Counting.calls > 0


def test_an_error_inside_a_step_names_whose_code_ran(install: Install, tiny: Path) -> None:
    """Whoever reads the traceback learns which plugins it may be in, and of which packages."""
    install("nanovllm-slipping", {"nanovllm.attention": {"slipping": "slipping_attention"}},
            {"slipping_attention": ATTENTION})  # fmt: skip
    with open_tiny(tiny, attention="slipping") as llm, pytest.raises(RuntimeError) as raised:
        llm.generate([PROMPT], SamplingParams(max_tokens=4))
    [note] = raised.value.__notes__
    assert "attention 'slipping' (nanovllm-slipping 1.2.3)" in note


def test_options_need_a_named_kernel_set() -> None:
    with pytest.raises(ConfigError, match=r"kernels: .*options \['x'\] need a named plugin"):
        open_tiny("demo", kernels={"options": {"x": 1}})


def test_what_cannot_serve_is_refused_with_the_reason_and_a_remedy() -> None:
    plugins = get_plugin_manager()
    with pytest.raises(PluginNotFoundError, match="no sampler 'gumbl' is installed; did you mean"):
        select_sampler(plugins, SamplerSettings(name="gumbl"), "cpu", False)


@pytest.mark.usefixtures("parts")
def test_a_sampler_that_cannot_be_captured_needs_eager_steps() -> None:
    plugins, choice = get_plugin_manager(), SamplerSettings(name="second")
    assert select_sampler(plugins, choice, "cpu", cuda_graphs=False).name == "second"
    with pytest.raises(UnsupportedError) as caught:
        select_sampler(plugins, choice, "cuda:0", cuda_graphs=True)
    assert caught.value.reasons == (
        "does not run on cuda, only on cpu",
        "it cannot be captured; set cuda_graphs: {enforce_eager: true}",
    )
    assert "nanovllm-second 1.2.3" in str(caught.value)


def test_the_names_are_the_defaults_of_the_configuration() -> None:
    config = EngineConfig(model="demo")
    assert (config.sampler.name, config.kernels.name) == ("gumbel", "auto")
    assert config.logits_processors == config.observers == ()
