"""What a row may ask of its sampling, drawn."""

from __future__ import annotations

import hypothesis.strategies as st

from nanovllm_core.interfaces.plan import RowSampling


def row_sampling(vocab: int) -> st.SearchStrategy[RowSampling]:
    """Rows that ask for any mix of what both tails do."""
    return st.builds(
        RowSampling,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        seed=st.integers(-(2**63), 2**63 - 1),
        top_k=st.sampled_from([0, 0, 1, 4, 20, 64, 65, vocab, 10 * vocab]),
        # Away from what equal shares add up to, where rounding would decide.
        top_p=st.sampled_from([1.0, 1.0, 0.31234567, 0.9515151, 1e-6]),
        min_p=st.sampled_from([0.0, 0.0, 0.1, 0.001]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, -0.2]),
        min_tokens=st.sampled_from([0, 0, 3, 20]),
        logprobs=st.sampled_from([None, None, 0, 3, 20]),
        stop_token_ids=st.sampled_from([(), (vocab - 1,), (0, 1, 2)]),
        logit_bias=st.dictionaries(
            st.integers(0, vocab - 1), st.floats(-20, 20, width=16), max_size=6
        )
        .map(dict.items)
        .map(tuple),
    )
