"""The conformance suite of attention backends.

    class TestMyAttention(AttentionConformance):
        @pytest.fixture
        def plugin(self) -> PluginUnderTest:
            return plugin_under_test(SPEC)

It runs on the GPU where the backend declares CUDA and the machine has one, else on the CPU with
smaller shapes; checks that need what the backend does not declare, or what the machine does not
have, are skipped with the reason. The checks are in several files, by what they are about.
"""

from __future__ import annotations

from nanovllm_kit.attention_blocks import AttentionBlocks
from nanovllm_kit.attention_declarations import AttentionDeclarations
from nanovllm_kit.attention_latent import AttentionLatent
from nanovllm_kit.attention_memory import AttentionMemory
from nanovllm_kit.attention_numbers import AttentionNumbers
from nanovllm_kit.attention_packed import AttentionPacked
from nanovllm_kit.attention_preparation import AttentionPreparation
from nanovllm_kit.attention_replay import AttentionReplay
from nanovllm_kit.attention_replay_prefill import AttentionPrefillReplay
from nanovllm_kit.attention_shapes import AttentionShapes
from nanovllm_kit.attention_state import AttentionState


# pytest runs the last base's checks first: what is declared, then the numbers of plain batches, so
# that the first failure is the one that tells most, and what needs a plan or a graph behind them.
class AttentionConformance(
    AttentionPacked,
    AttentionLatent,
    AttentionPrefillReplay,
    AttentionReplay,
    AttentionPreparation,
    AttentionMemory,
    AttentionState,
    AttentionShapes,
    AttentionBlocks,
    AttentionNumbers,
    AttentionDeclarations,
):
    """What every attention backend must hold."""
