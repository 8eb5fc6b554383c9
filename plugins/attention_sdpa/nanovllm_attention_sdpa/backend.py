"""Paged attention by gathering blocks into a bounded workspace and calling torch's SDPA.

Shape suffixes as in `nanovllm_core.interfaces.attention`; G query heads per KV head, L keys
gathered, Q queries. K and V are never copied per query head: where there is a mask, the query
heads that share a KV head are packed as more queries of it; where there is none, they see an
expanded view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from pydantic import BaseModel
from torch import Tensor

from nanovllm_attention_sdpa.chunk import ChunkAttention
from nanovllm_attention_sdpa.kernels import SdpaKernel
from nanovllm_attention_sdpa.packed import PackedAttention
from nanovllm_attention_sdpa.plugin import SdpaOptions
from nanovllm_attention_sdpa.workspace import (
    CPU_CACHE,
    GATHER_LIMIT,
    MIB,
    TABLE_LIMIT,
    WORKSPACE_LIMIT,
    Slice,
    slice_rows_and_heads,
    slot_bytes,
)
from nanovllm_core.api import (
    AttentionBackend,
    AttentionConfig,
    DecodeMetadata,
    InconsistentStateError,
    PackedMetadata,
    PrefillMetadata,
    UnsupportedError,
)


@dataclass(frozen=True, slots=True)
class DecodePart:
    """Rows and heads attended to in one call, with the block count of the longest of these rows.

    `tables`: block ids [R, m] and mask [R, L], views of the backend's tables, or None where the
    tables would be too large to keep.
    """

    rows: slice
    heads: slice
    num_blocks: int
    tables: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What `plan_decode` worked out for every layer of a step."""

    num_rows: int
    parts: list[DecodePart]
    padded: Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's queries in this step, and the keys they attend to."""

    queries: slice
    num_keys: int


class SdpaAttention(AttentionBackend):
    """torch's SDPA over gathered blocks. Holds at most 256 MiB, whatever the batch and lengths.

    So does each instance: an engine has one for each cache group of its model.
    """

    def __init__(self, options: BaseModel, config: AttentionConfig) -> None:
        super().__init__(options, config)
        kernel = cast(SdpaOptions, options).kernel
        self._attend = SdpaKernel(kernel, config.device, config.soft_cap)
        # A window that holds every sequence is none.
        window = config.sliding_window
        self._window = None if window is None or window >= config.max_model_len else window
        self._group = config.num_heads // config.num_kv_heads
        self._width = config.max_blocks_per_seq * config.block_size
        writes_scores = self._attend.writes_scores(config.head_size)
        self._attend_chunk = ChunkAttention(
            self._attend, self._group, config.scale, self._window, writes_scores
        )
        self._packed = PackedAttention(self._attend, config.scale)
        per_slot = slot_bytes(config.head_size, config.dtype.itemsize, copies_in_fp32=writes_scores)
        self._max_slots = GATHER_LIMIT // per_slot
        if self._width > self._max_slots:
            raise UnsupportedError(
                f"sdpa gathers one KV head of a sequence at a time: max_model_len "
                f"{config.max_model_len} needs {self._width * per_slot // MIB} MiB, its limit is "
                f"{GATHER_LIMIT // MIB} MiB ({self._max_slots} tokens); lower max_model_len or use "
                "a backend that reads blocks in place (attention: {backend: triton})"
            )
        # The keys that a decode row gathers at most: whole blocks, of which a window needs fewer.
        self._span = self._width
        if self._window is not None:
            num_blocks = (self._window + config.block_size - 2) // config.block_size + 1
            self._span = min(self._width, num_blocks * config.block_size)
        self._decode_slots = self._max_slots
        if config.device.type == "cpu":
            row = self._span * config.num_kv_heads
            self._decode_slots = min(self._max_slots, max(CPU_CACHE // per_slot, row))
        self._step: DecodeStep | None = None
        self._chunks: list[Chunk] = []

    def allocate(self) -> None:
        """Make the gather workspace and the decode tables; raises if they exceed the limit."""
        config, device = self.config, self.config.device
        largest = config.max_num_seqs * self._width * config.num_kv_heads
        slots = min(self._max_slots, largest)
        self._gathered = torch.empty(2, slots * config.head_size, dtype=config.dtype, device=device)
        self._block_starts = torch.arange(
            0, self._width, config.block_size, dtype=torch.int32, device=device
        )
        self._positions = torch.arange(self._width, dtype=torch.int32, device=device)
        self._padded = torch.empty(config.max_num_seqs, dtype=torch.bool, device=device)
        self._block_ids: Tensor | None = None
        self._bias: Tensor | None = None
        rows, itemsize = config.max_num_seqs, config.dtype.itemsize
        num_blocks = self._span // config.block_size
        if rows * (self._span * itemsize + num_blocks * 4) <= TABLE_LIMIT:
            self._block_ids = torch.zeros(rows, num_blocks, dtype=torch.int32, device=device)
            self._bias = torch.zeros(rows, self._span, dtype=config.dtype, device=device)
        if self.workspace_bytes > WORKSPACE_LIMIT:
            raise InconsistentStateError(
                f"sdpa allocated {self.workspace_bytes} bytes, its limit is {WORKSPACE_LIMIT}"
            )

    @property
    def workspace_bytes(self) -> int:
        """Bytes of every tensor that the backend keeps."""
        return sum(tensor.nbytes for tensor in self.captured_tensors().values())

    def captured_tensors(self) -> dict[str, Tensor]:
        """The workspace and the decode tables."""
        tensors = {
            "gathered": self._gathered,
            "block_starts": self._block_starts,
            "positions": self._positions,
            "padded": self._padded,
            "block_ids": self._block_ids,
            "bias": self._bias,
        }
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def describe(self) -> str:
        """The kernel that was asked for and torch's version."""
        return f"torch {torch.__version__} sdpa, kernel {self._attend.name}"

    # Decode

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        """Work out block ids, masks and slices once for all layers."""
        if metadata.query_len != 1:
            raise UnsupportedError(
                f"sdpa decodes one query per row, query_len is {metadata.query_len}; "
                "send longer queries as prefill chunks"
            )
        rows, seq_lens = metadata.num_rows, metadata.seq_lens
        if rows > self.config.max_num_seqs:
            raise InconsistentStateError(
                f"{rows} decode rows, the backend was made for {self.config.max_num_seqs}"
            )
        if rows == 0:
            self._step = DecodeStep(0, [], None)
            return
        lens = self._length_bounds(metadata)
        block_size = self.config.block_size
        num_blocks = -(-max(lens) // block_size)
        keys = num_blocks * block_size
        padded = self._plan_padding(seq_lens)
        if self._block_ids is not None and self._bias is not None:
            self._fill_block_ids(metadata, slice(0, rows), self._block_ids[:rows, :num_blocks])
            self._fill_bias(metadata, slice(0, rows), self._bias[:rows, :keys])
        slices = slice_rows_and_heads(rows, keys, self.config.num_kv_heads, self._decode_slots)
        parts = [self._plan_part(part, lens) for part in slices]
        self._step = DecodeStep(rows, parts, padded)

    def _plan_part(self, part: Slice, lens: list[int]) -> DecodePart:
        """A slice of the step, as long as the longest of its own rows."""
        num_blocks = -(-max(lens[part.rows]) // self.config.block_size)
        tables = None
        if self._block_ids is not None and self._bias is not None:
            keys = num_blocks * self.config.block_size
            tables = self._block_ids[part.rows, :num_blocks], self._bias[part.rows, :keys]
        return DecodePart(part.rows, part.heads, num_blocks, tables)

    def run_decode(
        self,
        q_BHD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: DecodeMetadata,
        out_BHD: Tensor,
    ) -> None:
        """Attend each row's query to its blocks; padded rows give zeros."""
        step = self._step
        if step is None or step.num_rows != metadata.num_rows:
            raise InconsistentStateError(
                f"run_decode got {metadata.num_rows} rows without a plan_decode for them"
            )
        q_BKGD = self._group_heads(q_BHD)
        out_BKGD = self._group_heads(out_BHD)
        for part in step.parts:
            if part.num_blocks == 0:
                continue
            block_ids, bias = part.tables or self._make_tables(metadata, part)
            k, v = self._gather(k_cache, v_cache, block_ids, part.heads)
            out = self._attend(
                q_BKGD[part.rows, part.heads], k, v, bias[:, None, None], self.config.scale
            )
            # With latent attention values are the gathered rows whole, of which the rest is unused.
            out_BKGD[part.rows, part.heads] = out[..., : out_BKGD.shape[-1]]
        if step.padded is not None:
            # A padded row attends to nothing: its softmax is 0 / 0.
            out_BHD.masked_fill_(step.padded, 0)

    def _group_heads(self, x_THD: Tensor) -> Tensor:
        """View [T, H, D] as [T, K, G, D], the query heads of one KV head together."""
        return x_THD.view(-1, self.config.num_kv_heads, self._group, x_THD.shape[-1])

    def _length_bounds(self, metadata: DecodeMetadata) -> list[int]:
        """A bound on the keys that each row gathers: exact on the CPU, the host's own on a device.

        Reading `seq_lens` from a device would stop the host once per step, and could not be
        captured.
        """
        if metadata.seq_lens.device.type == "cpu":
            lens = metadata.seq_lens
            return cast(list[int], (lens - self._skipped(lens)).tolist())
        return [min(metadata.max_seq_len, self._span)] * metadata.num_rows

    def _skipped(self, lens: Tensor) -> Tensor:
        """The tokens of whole blocks before each decode row's window, which are not gathered."""
        if self._window is None:
            return torch.zeros_like(lens)
        block_size = self.config.block_size
        return (lens - self._window).clamp_(min=0) // block_size * block_size

    def _plan_padding(self, seq_lens: Tensor) -> Tensor | None:
        """The rows to zero, [B, 1, 1]; None where the host knows that there are none."""
        if seq_lens.device.type == "cpu" and int(seq_lens.min()) > 0:
            return None
        padded = self._padded[: seq_lens.shape[0]]
        torch.eq(seq_lens, 0, out=padded)
        return padded[:, None, None]

    def _fill_block_ids(self, metadata: DecodeMetadata, rows: slice, out: Tensor) -> None:
        """Each row's block ids; past its end its own first block, and block 0 for a padded row.

        So no block is read that the row does not own, whatever the block table holds there. With a
        window the first block is the one in which the row's window begins.
        """
        table, lens = metadata.block_table[rows], metadata.seq_lens[rows, None]
        if self._window is not None:
            skipped = self._skipped(lens)
            columns = (skipped + self._block_starts[: out.shape[1]]) // self.config.block_size
            table = table.gather(1, columns.clamp_(max=table.shape[1] - 1).long())
            lens = lens - skipped
        first = table[:, :1] * (lens > 0)
        used = self._block_starts[: out.shape[1]] < lens
        torch.where(used, table[:, : out.shape[1]], first, out=out)

    def _fill_bias(self, metadata: DecodeMetadata, rows: slice, out: Tensor) -> None:
        """0 where the row's query sees a key, -inf past its end and before its window."""
        lens, positions = metadata.seq_lens[rows, None], self._positions[: out.shape[1]]
        if self._window is None:
            out.zero_().masked_fill_(positions >= lens, float("-inf"))
            return
        lens = lens - self._skipped(lens)
        hidden = (positions >= lens) | (positions < lens - self._window)
        out.zero_().masked_fill_(hidden, float("-inf"))

    def _make_tables(self, metadata: DecodeMetadata, part: DecodePart) -> tuple[Tensor, Tensor]:
        """Block ids and mask of some rows, for this call alone."""
        rows, num_blocks = part.rows, part.num_blocks
        count = rows.stop - rows.start
        block_ids = metadata.block_table.new_empty(count, num_blocks)
        bias = self._gathered.new_empty(count, num_blocks * self.config.block_size)
        self._fill_block_ids(metadata, rows, block_ids)
        self._fill_bias(metadata, rows, bias)
        return block_ids, bias

    def _gather(
        self, k_cache: Tensor, v_cache: Tensor, block_ids: Tensor, heads: slice
    ) -> tuple[Tensor, Tensor]:
        """Copy blocks [R, m] of some KV heads into the workspace: K and V as [R, K, L, D].

        The rows of latent attention are copied once, for both.
        """
        rows, block_size = block_ids.shape[0], self.config.block_size
        head_size = self.config.head_size
        num_heads = heads.stop - heads.start
        shape = (block_ids.numel(), block_size, num_heads, head_size)
        ids = block_ids.reshape(-1)
        gathered = []
        caches = (k_cache,) if self.config.latent else (k_cache, v_cache)
        for cache, space in zip(caches, self._gathered, strict=False):
            target = space[: block_ids.numel() * block_size * num_heads * head_size].view(shape)
            torch.index_select(cache[:, :, heads], 0, ids, out=target)
            gathered.append(target.view(rows, -1, num_heads, head_size).transpose(1, 2))
        return gathered[0], gathered[-1]

    # Prefill

    def plan_prefill(self, metadata: PrefillMetadata) -> None:
        """Read the chunks' bounds once for all layers.

        On a device this is the instance's one synchronising call of a step; prefill is neither
        captured nor the steady path.
        """
        bounds = torch.cat((metadata.query_start_loc, metadata.seq_lens)).tolist()
        num_seqs = metadata.seq_lens.shape[0]
        starts, seq_lens = bounds[: num_seqs + 1], bounds[num_seqs + 1 :]
        self._chunks = [
            Chunk(slice(start, end), num_keys)
            for start, end, num_keys in zip(starts, starts[1:], seq_lens, strict=False)
        ]

    def run_prefill(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: PrefillMetadata,
        out_THD: Tensor,
    ) -> None:
        """Attend each chunk's queries to its sequence, the last query to every key."""
        if len(self._chunks) != metadata.seq_lens.shape[0]:
            raise InconsistentStateError(
                f"run_prefill got {metadata.seq_lens.shape[0]} sequences without a plan_prefill"
            )
        q_TKGD = self._group_heads(q_THD)
        out_TKGD = self._group_heads(out_THD)
        for row, chunk in enumerate(self._chunks):
            if chunk.queries.start == chunk.queries.stop:
                continue
            first_block = 0
            if self._window is not None:  # of the first query
                num_queries = chunk.queries.stop - chunk.queries.start
                first_key = chunk.num_keys - num_queries - self._window + 1
                first_block = max(0, first_key) // self.config.block_size
            end_block = -(-chunk.num_keys // self.config.block_size)
            block_ids = metadata.block_table[row : row + 1, first_block:end_block]
            keys = block_ids.shape[1] * self.config.block_size
            heads = self.config.num_kv_heads
            for part in slice_rows_and_heads(1, keys, heads, self._max_slots):
                k, v = self._gather(k_cache, v_cache, block_ids, part.heads)
                self._attend_chunk.run(
                    q_TKGD[chunk.queries, part.heads].permute(1, 2, 0, 3),
                    k,
                    v,
                    chunk.num_keys - first_block * self.config.block_size,
                    out_TKGD[chunk.queries, part.heads].permute(1, 2, 0, 3),
                )

    # Packed

    def plan_packed(self, metadata: PackedMetadata) -> None:
        """Read the sequences' bounds once for all layers, waiting for a GPU as `plan_prefill`."""
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
        """Attend each sequence's queries to its keys, one sequence after another."""
        self._packed.run(q_THD, k_LHD, v_LHV, metadata, out_THV, lse_HT)
