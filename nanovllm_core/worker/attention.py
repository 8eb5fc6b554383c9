"""Runs a model's attention layers through the chosen backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import takewhile

import torch
from torch import Tensor

from nanovllm_core.errors import UnsupportedError
from nanovllm_core.interfaces.absorption import suit_capture
from nanovllm_core.interfaces.attention import (
    AttentionBackend,
    AttentionConfig,
    DecodeMetadata,
    PrefillMetadata,
)
from nanovllm_core.interfaces.cache_groups import CacheGroup
from nanovllm_core.interfaces.executor import WorkerSetup
from nanovllm_core.interfaces.kernels import AdaptingKernels, KernelSet
from nanovllm_core.interfaces.model import AttentionShape
from nanovllm_core.interfaces.plan import PrefillChunk
from nanovllm_core.layers import Attention, AttentionLayer, LatentAttention
from nanovllm_core.registry.objects import make_plugin
from nanovllm_core.worker.kv_cache import CacheLayout, LayerCache
from nanovllm_core.worker.latent import LatentPrompts
from nanovllm_core.worker.model import LoadedModel


class GroupBackends:
    """The prefill and the decode backend of one cache group, one object where both are one choice.

    A plan of a backend holds for one block table, so each group has instances of its own.
    """

    def __init__(self, setup: WorkerSetup, config: AttentionConfig) -> None:
        self.prefill: AttentionBackend = make_plugin(setup.prefill_attention, config)
        self.decode = self.prefill
        if setup.decode_attention != setup.prefill_attention:
            self.decode = make_plugin(setup.decode_attention, config)
            self.decode.allocate()
        self.prefill.allocate()
        self.latent_prompts = LatentPrompts(self.prefill, config) if config.latent else None

    def describe(self) -> str:
        """The implementations that run."""
        if self.prefill is self.decode:
            return self.decode.describe()
        return f"prefill {self.prefill.describe()}, decode {self.decode.describe()}"

    def plan_prefill(self, chunks: PrefillMetadata, slots_T: Tensor) -> None:
        """Plan the prompt chunks of a step; their tokens are the last of `slots_T`."""
        if self.latent_prompts and chunks.num_context is not None:
            self.latent_prompts.plan(chunks, chunks.num_context, slots_T)
        else:
            self.prefill.plan_prefill(chunks)


class PagedAttention:
    """Prepares q, stores k and v, and calls the decode and the prefill backend for their tokens.

    A decode backend that prepares a layer itself gets packed q, k, v, in steps without prompts.
    The backends have their workspaces. Every attention layer of the model is bound to this object
    (`AttentionLayer.bind`), so there is no global context and two engines live side by side.
    """

    cache: Tensor
    """Blocks of all layers, as `CacheLayout.allocate` makes them; there before the first step."""

    def __init__(self, setup: WorkerSetup, kernels: KernelSet, model: LoadedModel) -> None:
        layers = [one for one in model.module.modules() if isinstance(one, AttentionLayer)]
        self.layout = CacheLayout(model.shape, setup.block_size, model.dtype)
        self.groups = [
            GroupBackends(setup, _config(setup, model, group, layers))
            for group in self.layout.groups
        ]
        latent = (group.latent_prompts for group in self.groups)
        self.context_part = max((one.part_size for one in latent if one), default=0)
        """The most tokens of context that a layer computes keys and values of at once."""
        self._kernels = kernels
        self._device = model.device
        for index, layer in enumerate(layers):
            layer.bind(self, index)
        if isinstance(kernels, AdaptingKernels):
            rows = self._prepared_rows(layers, setup.config.limits.max_num_seqs)
            kernels.announce_prepared_decode(rows)

    def describe(self) -> str:
        """The implementations that run, those of different groups by their descriptions."""
        return "; ".join(dict.fromkeys(group.describe() for group in self.groups))

    def _prepared_rows(self, layers: Sequence[AttentionLayer], max_rows: int) -> int:
        """The most decode rows of which, as of all fewer, every backend prepares q, k and v."""
        groups = zip(self.layout.groups, self.groups, strict=True)
        kinds = [(layers[index], two.decode) for one, two in groups for index in one.layers]

        def are_prepared(rows: int) -> bool:
            return all(
                isinstance(layer, Attention) and backend.prepares_decode(layer.prep, rows)
                for layer, backend in kinds
            )

        return sum(1 for _ in takewhile(are_prepared, range(1, max_rows + 1)))

    def allocate_cache(self, num_blocks: int) -> None:
        """Use this many fresh blocks from now on."""
        self.cache = self.layout.allocate(num_blocks, self._device)
        self._layers: Sequence[LayerCache] = self.layout.split(self.cache)

    def clear_blocks(self, block_ids: Tensor) -> None:
        """Make blocks zeros behind all steps so far: the owner before may have left a NaN there."""
        self.cache.index_fill_(2, block_ids.long(), 0)

    def captured_tensors(self) -> Mapping[str, Tensor]:
        """The tensors that captured kernels read and no graph owns, by name."""
        return {"kv_cache": self.cache} | {
            f"attention[{number}].{phase}.{name}": tensor
            for number, group in enumerate(self.groups)
            for phase, backend in (("prefill", group.prefill), ("decode", group.decode))
            for name, tensor in backend.captured_tensors().items()
        }

    def suit_capture(self, chunks: Sequence[PrefillChunk]) -> bool:
        """Whether these chunks may be those of a captured step."""
        latent = (one.attention for one in self.layout.groups if one.attention.latent)
        return all(suit_capture(chunks, one.num_heads) for one in latent)

    def begin_step(
        self,
        slot_mapping_GT: Tensor,
        decode: Sequence[DecodeMetadata] = (),
        prefill: Sequence[PrefillMetadata] = (),
        sampled_S: Tensor | None = None,
    ) -> None:
        """Plan a step of decode tokens, then packed prompt chunks; the layers run next.

        What is given of a phase is one for each group; none where the step has none of the phase.
        `sampled_S`: the indices of the tokens that the step samples from, None for all.
        """
        self._sampled, self.has_kept_sampled = sampled_S, False
        for group, one in zip(self.groups, decode, strict=bool(decode)):
            group.decode.plan_decode(one)
        self._slots, self._decode, self._prefill = slot_mapping_GT.unbind(), decode, prefill
        num_decode = decode[0].num_rows if decode else 0
        for group, chunks, slots_T in zip(self.groups, prefill, self._slots, strict=bool(prefill)):
            group.plan_prefill(chunks, slots_T[num_decode:])

    def keep_sampled(self, layer: AttentionLayer, *tensors: Tensor) -> tuple[Tensor, ...]:
        """See `AttentionRuntime`. All tokens are kept where those to sample from are no fewer."""
        sampled, is_last = self._sampled, layer.layer_index == len(self._layers) - 1
        if sampled is None or not is_last or len(sampled) >= len(tensors[0]):
            return tensors
        self.has_kept_sampled = True
        return tuple(x.index_select(0, sampled) for x in tensors)

    def attend(self, layer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        """Packed qkv of one layer -> attention output [T, num_heads * head_size]."""
        number, k_cache, v_cache = self._layers[layer.layer_index]
        group, slots_T, prep = self.groups[number], self._slots[number], layer.prep
        out_THD = qkv_TX.new_empty((len(qkv_TX), prep.num_heads, prep.head_size))
        decode = self._decode[number] if self._decode else None
        num_decode = decode.num_rows if decode else 0
        # Beside prompts, which the kernel set prepares, it would save no kernel.
        if decode and not self._prefill and group.decode.prepares_decode(prep, num_decode):
            group.decode.run_decode_from_qkv(
                qkv_TX, prep, positions_T, slots_T, k_cache, v_cache, decode, out_THD
            )
            return out_THD.flatten(1)
        q_THD = self._kernels.prepare_qkv(qkv_TX, prep, positions_T, slots_T, k_cache, v_cache)
        if decode:
            group.decode.run_decode(
                q_THD[:num_decode], k_cache, v_cache, decode, out_THD[:num_decode]
            )
        if self._prefill:
            group.prefill.run_prefill(
                q_THD[num_decode:], k_cache, v_cache, self._prefill[number], out_THD[num_decode:]
            )
        return out_THD.flatten(1)

    def attend_latent(
        self, layer: LatentAttention, q_THD: Tensor, rows_TR: Tensor, positions_T: Tensor
    ) -> Tensor:
        """Queries and rows of one layer -> attention output [T, num_heads * value_size]."""
        number, k_cache, v_cache = self._layers[layer.layer_index]
        group, slots_T = self.groups[number], self._slots[number]
        rows_NPR = k_cache.squeeze(2)
        q_THD = self._kernels.prepare_latent(
            q_THD, rows_TR, layer.prep, positions_T, slots_T, rows_NPR
        )
        decode = self._decode[number] if self._decode else None
        chunks = self._prefill[number] if self._prefill else None
        num_decode = decode.num_rows if decode else 0
        # Of padded steps, captured or not, the host knows no context.
        expands = chunks is not None and chunks.num_context is not None
        absorbed = num_decode if expands else len(q_THD)
        outputs = []
        if absorbed:
            q_AHR = layer.absorb(q_THD[:absorbed])
            out_AHL = q_AHR.new_empty((*q_AHR.shape[:2], v_cache.shape[-1]))
            caches = k_cache, v_cache
            if decode:
                group.decode.run_decode(q_AHR[:num_decode], *caches, decode, out_AHL[:num_decode])
            if chunks and not expands:
                group.prefill.run_prefill(q_AHR[num_decode:], *caches, chunks, out_AHL[num_decode:])
            outputs.append(layer.expand_output(out_AHL))
        if expands and group.latent_prompts:
            outputs.append(group.latent_prompts.run(layer, q_THD[num_decode:], rows_NPR))
        out_THV = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out_THV.flatten(1)


def _config(
    setup: WorkerSetup, model: LoadedModel, group: CacheGroup, layers: Sequence[AttentionLayer]
) -> AttentionConfig:
    """What the backends of a group are made for; its layers must have one scale."""
    first = group.layers[0]
    for index in group.layers:
        if layers[index].scale != layers[first].scale:
            raise UnsupportedError(
                f"attention layer {index} has scale={layers[index].scale}, not scale="
                f"{layers[first].scale} as layer {first} of its cache group: one backend serves "
                "all layers of a group; use a model whose layers do not differ in it"
            )
    limits = setup.config.limits
    return AttentionConfig(
        device=model.device,
        dtype=model.dtype,
        **{one.name: getattr(group.attention, one.name) for one in fields(AttentionShape)},
        scale=layers[first].scale,
        block_size=setup.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=setup.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )
