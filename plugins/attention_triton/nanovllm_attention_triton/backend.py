"""The Triton attention backend: checks what it is given, then launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from pydantic import BaseModel
from torch import Tensor

from nanovllm_attention_triton.decode import (
    DecodeShape,
    DecodeWorkspace,
    PlannedWork,
    num_multiprocessors,
    shared_memory,
    triton_version,
)
from nanovllm_attention_triton.decode_tuning import (
    HOPPER_LATENT,
    DecodeTuning,
    LatentTuning,
    decode_tunings,
    latent_tuning,
)
from nanovllm_attention_triton.hopper_latent import make_latent_workspace
from nanovllm_attention_triton.hopper_limits import hopper_latent_limits
from nanovllm_attention_triton.hopper_prefill import hopper_kernel_serves, on_hopper
from nanovllm_attention_triton.latent_prefill import latent_prefill
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_attention_triton.packed import PackedPrompts
from nanovllm_attention_triton.prefill import (
    CAUSAL,
    fits_large_tiles,
    has_copy_engine,
    has_large_memory,
    prefill_attention,
)
from nanovllm_attention_triton.prefill_tuning import (
    LARGE_TILE,
    PackedTuning,
    PrefillTuning,
    latent_prefill_tuning,
    prefill_tuning,
)
from nanovllm_attention_triton.sizes import WIDE, padded_head_size
from nanovllm_attention_triton.split_work import SplitShape, SplitWork
from nanovllm_core.api import (
    AttentionBackend,
    AttentionConfig,
    DecodeMetadata,
    InconsistentStateError,
    PackedMetadata,
    PrefillMetadata,
    QKPrep,
    UnsupportedError,
)


class TritonAttention(AttentionBackend):
    """Paged attention by Triton kernels; see `decode_kernels` and `prefill_kernels`.

    Batches of few rows and of many are cut and compiled differently, so each has a workspace.
    `decode_tunings` (rows at most, constants), increasing, may be replaced before `allocate`, as a
    benchmark does; the last must hold max_num_seqs rows.
    """

    def __init__(self, options: BaseModel, config: AttentionConfig) -> None:
        super().__init__(options, config)
        self._options = cast(TritonOptions, options)
        self.decode_tunings = self._decode_tunings()
        # A window that holds every sequence is none, and costs nothing.
        window = config.sliding_window
        self._window = None if window is None or window >= config.max_model_len else window
        self._workspaces: list[PlannedWork] = []
        self._prefill_tickets: Tensor | None = None
        self._splits: SplitWork | None = None
        self._packed = PackedPrompts(config)
        self._has_prefilled = False

    def allocate(self) -> None:
        config, options = self.config, self._options
        if self._has_warp_roles() and not config.latent:
            self._prefill_tickets = torch.zeros(1, dtype=torch.int32, device=config.device)
        self._workspaces = [
            self._make_workspace(rows, tuning) for rows, tuning in self.decode_tunings
        ]
        if not options.chunk_size:  # with it, rows have the same bits in every batch
            self._splits = self._make_splits(self._prompt_tuning())

    def _decode_tunings(self) -> list[tuple[int, DecodeTuning]]:
        config, options = self.config, self._options
        most, element_size = config.max_num_seqs, config.dtype.itemsize
        if config.latent:
            if self._takes_hopper_latent(config.latent.latent_size):
                return [(most, HOPPER_LATENT)]
            return [(most, latent_tuning(element_size, config.num_heads, options))]
        heads = config.num_heads, config.num_kv_heads
        return decode_tunings(
            element_size, config.head_size, *heads, most, options,
            num_multiprocessors=num_multiprocessors(config.device),
            shared_memory=shared_memory(config.device),
        )  # fmt: skip

    def _takes_hopper_latent(self, value_size: int) -> bool:
        """Whether latent rows are decoded by the kernel for Hopper.

        Where the user chose it and it cannot serve, UnsupportedError: the spec's check may not have
        seen this device.
        """
        config, device = self.config, self.config.device
        if self._options.latent_kernel == "portable":
            return False
        is_gpu = device.type == "cuda"
        reasons = hopper_latent_limits(
            self._options,
            device=device.type,
            capability=torch.cuda.get_device_capability(device) if is_gpu else None,
            triton_version=triton_version(),
            dtype=str(config.dtype).removeprefix("torch."),
            value_size=value_size,
            rest_size=config.head_size - value_size,
            block_size=config.block_size,
        )
        if reasons and self._options.latent_kernel == "hopper":
            raise UnsupportedError(f"attention triton: {'; '.join(reasons)}")
        return not reasons

    def _make_workspace(self, max_num_seqs: int, tuning: DecodeTuning) -> PlannedWork:
        config = self.config
        if config.latent:
            return make_latent_workspace(
                cast(LatentTuning, tuning),
                config.device,
                num_heads=config.num_heads,
                value_size=config.latent.latent_size,
                rest_size=config.head_size - config.latent.latent_size,
                max_num_seqs=max_num_seqs,
                max_seq_len=config.max_model_len,
            )
        return DecodeWorkspace(
            DecodeShape(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_size=config.head_size,
                max_num_seqs=max_num_seqs,
                max_seq_len=config.max_model_len,
                num_multiprocessors=num_multiprocessors(config.device),
                window=self._window,
                soft_cap=config.soft_cap,
                shared_memory=shared_memory(config.device),
                most_heads=tuning.most_heads,
            ),
            tuning,
            config.device,
        )

    def _prompt_tuning(self) -> PrefillTuning | PackedTuning:
        """The constants of prompts, for a cache whose addresses are aligned."""
        config, element_size = self.config, self.config.dtype.itemsize
        if config.latent:
            rest_size = config.head_size - config.latent.latent_size
            return latent_prefill_tuning(element_size, rest_size, on_hopper(config.device))
        has_tiles = config.head_size > WIDE and config.block_size % LARGE_TILE == 0
        large = has_tiles and has_copy_engine(config.device) and has_large_memory(config.device)
        return prefill_tuning(element_size, config.head_size, large, self._options)

    def _make_splits(self, tuning: PrefillTuning | PackedTuning) -> SplitWork:
        config = self.config
        value_size = config.latent.latent_size if config.latent else config.head_size
        shape = SplitShape(
            num_kv_heads=config.num_kv_heads,
            group=config.num_heads // config.num_kv_heads,
            block_m=tuning.block_m,
            block_n=tuning.block_n,
            block_d=padded_head_size(value_size),
            num_multiprocessors=num_multiprocessors(config.device),
            resident=tuning.resident,
            max_num_seqs=config.max_num_seqs,
            window=self._window,
        )
        return SplitWork(shape, config.device)

    def _workspace(self, num_rows: int) -> PlannedWork:
        """The first that holds `num_rows`."""
        if not self._workspaces:
            raise InconsistentStateError("TritonAttention: allocate() must come before decode")
        for workspace in self._workspaces:
            if num_rows <= workspace.shape.max_num_seqs:
                return workspace
        raise InconsistentStateError(
            f"decode batch of {num_rows} rows; the workspace holds max_num_seqs="
            f"{self.config.max_num_seqs}"
        )

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        if metadata.query_len != 1:
            raise UnsupportedError(
                f"attention triton decodes one query token per row, not query_len="
                f"{metadata.query_len}: send longer queries to run_prefill"
            )
        workspace = self._workspace(metadata.num_rows)
        workspace.plan(metadata.seq_lens, metadata.block_table, self.config.block_size)

    def run_decode(
        self,
        q_BHD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: DecodeMetadata,
        out_BHD: Tensor,
    ) -> None:
        self._check_tensors(q_BHD, k_cache, v_cache, out_BHD)
        self._workspace(q_BHD.shape[0]).run(
            q_BHD,
            k_cache,
            v_cache,
            metadata.block_table,
            metadata.max_seq_len,
            self.config.scale,
            out_BHD,
        )

    def prepares_decode(self, prep: QKPrep, num_rows: int) -> bool:
        if self.config.latent or self._options.chunk_size:
            return False  # the newest key is added last, which would be other bits in other batches
        # The interpreter runs one program at a time: for tests, it always does.
        interpreted = self.config.device.type != "cuda"
        return interpreted or self._workspace(num_rows).shape.prepares(num_rows)

    def run_decode_from_qkv(
        self,
        qkv_BX: Tensor,
        prep: QKPrep,
        positions_B: Tensor,
        slot_mapping_B: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: DecodeMetadata,
        out_BHD: Tensor,
    ) -> None:
        self._check_tensors(qkv_BX, k_cache, v_cache, out_BHD)
        cast(DecodeWorkspace, self._workspace(qkv_BX.shape[0])).run_from_qkv(
            qkv_BX,
            prep,
            positions_B,
            slot_mapping_B,
            k_cache,
            v_cache,
            metadata.block_table,
            metadata.max_seq_len,
            self.config.scale,
            out_BHD,
        )

    def plan_prefill(self, metadata: PrefillMetadata) -> None:
        if self._splits is not None:
            self._splits.plan(metadata)

    def run_prefill(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: PrefillMetadata,
        out_THD: Tensor,
    ) -> None:
        self._check_tensors(q_THD, k_cache, v_cache, out_THD)
        splits = self._splits
        if splits and not splits.serves(metadata, len(q_THD)):
            splits = None
        if self.config.latent:
            latent_prefill(q_THD, k_cache, metadata, self.config.scale, out_THD, splits=splits)
            return
        large = fits_large_tiles(k_cache, v_cache)
        tuning = prefill_tuning(q_THD.element_size(), q_THD.shape[-1], large, self._options)
        if splits and not splits.shape.matches(tuning):
            splits = None
        if not self._has_prefilled:
            # The first step is the start's trial, and long: no request shall be the first to have
            # the kernels of short prompts compiled. What they write is written again below.
            self._has_prefilled = True
            plain = replace(tuning, warp_roles=False)
            work = self._splits
            if work and splits is None and work.shape.matches(tuning):
                short = replace(
                    metadata,
                    block_table=metadata.block_table[:1],
                    seq_lens=metadata.seq_lens[:1],
                    query_start_loc=metadata.query_start_loc[:2],
                    max_query_len=1,
                    max_seq_len=self.config.max_model_len,
                )
                work.plan(short)
                self._attend(q_THD, k_cache, v_cache, short, out_THD, plain, work)
            if self._prefill_tickets is not None:
                self._attend(q_THD, k_cache, v_cache, metadata, out_THD, plain, splits)
        self._attend(q_THD, k_cache, v_cache, metadata, out_THD, tuning, splits)

    def _attend(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: PrefillMetadata,
        out_THD: Tensor,
        tuning: PrefillTuning,
        splits: SplitWork | None,
    ) -> None:
        """`run_prefill` by the kernel that `tuning` and the queries ask for."""
        prefill_attention(
            q_THD,
            k_cache,
            v_cache,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            metadata.max_query_len,
            self.config.scale,
            out_THD,
            tuning,
            window=CAUSAL if self._window is None else (self._window - 1, 0),
            soft_cap=self.config.soft_cap,
            tickets=self._prefill_tickets,
            splits=splits,
        )

    def plan_packed(self, metadata: PackedMetadata) -> None:
        self._packed.plan(metadata)

    def run_packed(
        self,
        q_THD: Tensor,
        k_LHD: Tensor,
        v_LHV: Tensor,
        metadata: PackedMetadata,
        out_THV: Tensor,
        lse_HT: Tensor | None = None,
    ) -> None:
        self._packed.run(q_THD, k_LHD, v_LHV, metadata, out_THV, lse_HT)

    def _has_warp_roles(self) -> bool:
        """Whether prompts run on a kernel for Hopper."""
        config = self.config
        if config.latent:
            return self._packed.has_warp_roles
        tuning = prefill_tuning(config.dtype.itemsize, config.head_size, False, self._options)
        plain = self._window is None and config.soft_cap is None
        return (
            plain
            and tuning.warp_roles
            and hopper_kernel_serves(
                config.device, config.dtype, config.head_size, config.block_size
            )
        )

    def _check_tensors(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """A few host comparisons per layer: a wrong layout is an error, not a wrong text."""
        if k_cache.shape[1] != self.config.block_size:
            raise InconsistentStateError(
                f"blocks of {k_cache.shape[1]} tokens; the backend was made for block_size="
                f"{self.config.block_size}"
            )
        if k_cache.stride() != v_cache.stride():
            raise UnsupportedError(
                f"attention triton needs K and V blocks of equal strides, got {k_cache.stride()} "
                f"and {v_cache.stride()}"
            )
        if not q.stride(-1) == out.stride(-1) == k_cache.stride(-1) == 1:
            raise UnsupportedError(
                "attention triton needs a contiguous head dimension, got strides "
                f"q {q.stride()}, out {out.stride()}, k_cache {k_cache.stride()}"
            )

    def captured_tensors(self) -> Mapping[str, Tensor]:
        tensors = {
            f"{name}_up_to_{workspace.shape.max_num_seqs}_rows": tensor
            for workspace in self._workspaces
            for name, tensor in workspace.tensors().items()
        }
        if self._prefill_tickets is not None:
            tensors["prefill_tickets"] = self._prefill_tickets
        return tensors | (self._splits.tensors() if self._splits else {})

    def describe(self) -> str:
        decode = ", ".join(f"up to {rows} rows: {t}" for rows, t in self.decode_tunings)
        roles = ", prefill by warp roles" if self._has_warp_roles() else ""
        return f"triton {triton_version()}, decode {decode}{roles}"
