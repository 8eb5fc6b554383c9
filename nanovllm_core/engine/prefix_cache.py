"""Blocks found again by their content.

A full block is named by a chained hash: xxh3_128 over the parent block's digest and the block's own
token ids (int32, little-endian). The chain starts from the digest of whatever else changes the KV
(a cache salt), so equal digests mean equal content of this block and of all before it.

xxh3_128 is fast, not cryptographic: give tenants who must not learn of each other's prompts
different salts.
"""

from __future__ import annotations

import xxhash

from nanovllm_core.engine.block_pool import BlockPool
from nanovllm_core.engine.request import Request


class PagedKV:
    """The verbs that give requests their blocks and share what is equal.

    Only full blocks are shared, and only once their KV is computed and their ids are known on the
    host. A live block table is never rewritten: content computed twice stays in two blocks.
    """

    def __init__(self, pool: BlockPool, block_size: int, prefix_caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.early_steps = block_size // 4
        """When one row needs a block, rows that need one within this many steps get theirs too."""
        self.prefix_caching = prefix_caching

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def num_sharable(self, num_tokens: int) -> int:
        """Full blocks that a request of so many known ids may take over: one id is computed."""
        return (num_tokens - 1) // self.block_size if self.prefix_caching else 0

    def match(self, request: Request) -> list[int]:
        """The blocks of the longest cached prefix of a request without a row; takes none."""
        blocks: list[int] = []
        for digest in self._digests(request, self.num_sharable(request.num_tokens)):
            if (block_id := self.pool.find(digest)) is None:
                break
            blocks.append(block_id)
        return blocks

    def num_new_blocks(self, request: Request, num_tokens: int) -> int:
        """Free blocks that computing `num_tokens` more tokens of a request would take."""
        if request.row >= 0:
            return self.num_blocks_for(request.num_scheduled + num_tokens) - len(request.block_ids)
        hits = self.match(request)
        total = self.num_blocks_for(len(hits) * self.block_size + num_tokens)
        return total - sum(not self.pool.is_free(block_id) for block_id in hits)

    def share(self, request: Request) -> None:
        """Give a request without a row the blocks of its longest cached prefix."""
        request.block_ids = self.match(request)
        for block_id in request.block_ids:
            self.pool.retain(block_id)
        request.num_published = len(request.block_ids)

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        """Give a request the blocks it lacks for `num_tokens` positions; returns the new ones."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        return [self.add_block(request) for _ in range(missing)]

    def add_block(self, request: Request) -> int:
        """Give a request one more block; the caller made room for it."""
        block_id = self.pool.allocate()
        request.block_ids.append(block_id)
        return block_id

    def publish(self, request: Request, num_computed: int) -> None:
        """Make the full blocks below `num_computed` findable: their KV and their ids are known."""
        first, last = request.num_published, num_computed // self.block_size
        if last <= first or not self.prefix_caching:
            return
        digests = self._digests(request, last)
        for index in range(first, last):
            self.pool.publish(request.block_ids[index], digests[index])
        request.num_published = last

    def release(self, request: Request) -> None:
        """Take a request's blocks back. Plans already submitted read them before any later one."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_published = 0

    def _digests(self, request: Request, num_blocks: int) -> list[bytes]:
        """The digests of a request's blocks: those of the first `num_blocks`, which must be full.

        And of no others: a later look-up never asks for fewer blocks than an earlier one.
        """
        digests = request.digests
        if len(digests) < num_blocks:
            size = self.block_size
            ids = request.token_ids if request.row < 0 else request.table.token_ids[request.row]
            digest = digests[-1] if digests else xxhash.xxh3_128_digest(request.cache_salt)
            for i in range(len(digests), num_blocks):
                digest = xxhash.xxh3_128_digest(digest + ids[i * size : (i + 1) * size].tobytes())
                digests.append(digest)
        return digests
