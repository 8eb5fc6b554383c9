"""The block tables of requests, and blocks found again by their content.

A request has a block table for each cache group, all of one length: entry i covers the tokens
i * block_size to (i + 1) * block_size - 1. In a group with a sliding window the blocks behind it
are freed, and their entries are `NO_BLOCK`.

A full block is named by a chained hash: xxh3_128 over the parent block's digest and the block's own
token ids (int32, little-endian). The chain starts from the digest of whatever else changes the KV
(a cache salt), so equal digests mean equal content of this block and of all before it.

xxh3_128 is fast, not cryptographic: give tenants who must not learn of each other's prompts
different salts.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import xxhash

from nanovllm_core.engine.block_pool import NO_BLOCK, BlockPool
from nanovllm_core.engine.limits import EngineLimits
from nanovllm_core.engine.request import Request

Append = tuple[int, int, int, int]
"""Row, cache group, index in the row's block table of that group, block id."""


class PagedKV:
    """The verbs that give requests their blocks and share what is equal.

    Only full blocks are shared, and only once their ids are known on the host and their KV is
    computed, by a step that is over or by one before the plan that shares them. Content computed
    twice stays in two blocks.
    """

    def __init__(self, limits: EngineLimits, prefix_caching: bool) -> None:
        self.pool = BlockPool(limits.num_blocks)
        self.block_size = limits.block_size
        self.need = limits.need
        self.windows = limits.cache_windows
        bounded = ((g, w) for g, w in enumerate(self.windows) if w is not None)
        self._bounded = sorted(bounded, key=itemgetter(1))
        """The groups with a window, each with it, the shortest first."""
        self.early_steps = self.block_size // 4
        """When one row needs a block, rows that need one within this many steps get theirs too."""
        self.prefix_caching = prefix_caching

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def num_sharable(self, num_tokens: int) -> int:
        """Full blocks that a request of so many known ids may take over: one id is computed."""
        return (num_tokens - 1) // self.block_size if self.prefix_caching else 0

    def first_block(self, window: int, position: int) -> int:
        """The index of the first block that the window of a position reaches."""
        return max(0, position - window + 1) // self.block_size

    def match(self, request: Request) -> list[list[int]]:
        """The block tables of the longest cached prefix of a request without a row; takes no block.

        It has all blocks that the next token can see: in a group without a window every block, in
        one with a window the last ones. What lies before these is `NO_BLOCK`.
        """
        digests = self._digests(request, self.num_sharable(request.num_tokens))
        tables: list[list[int]] = [[]] * len(self.windows)
        length = len(digests)
        for group, whole in enumerate(self.windows):
            if whole is None:
                tables[group] = self._find(digests[:length], group)
                length = len(tables[group])
        number = 0
        while number < len(self._bounded):
            group, window = self._bounded[number]
            unseen = self.first_block(window, length * self.block_size)
            tables[group] = self._find(digests[unseen:length], group)
            found = unseen + len(tables[group])
            # Every longer prefix, up to the one tried, has the same gap in its window.
            number = number + 1 if found == length else 0
            length = found
        return [[NO_BLOCK] * (length - len(table)) + table[:length] for table in tables]

    def _find(self, digests: list[bytes], group: int) -> list[int]:
        """The blocks of one group with these contents, up to the first that is not there."""
        find = self.pool.find
        blocks: list[int] = []
        for digest in digests:
            if (block_id := find((digest, group))) == NO_BLOCK:
                break
            blocks.append(block_id)
        return blocks

    def num_new_blocks(self, request: Request, num_tokens: int) -> int:
        """The most free blocks that computing `num_tokens` more tokens of a request would take.

        In chunks as long as a step: what lies behind a window by then is free again. 0 where the
        request has more blocks already, as a row that decodes may, early.
        """
        if request.row >= 0:
            done = request.num_scheduled
            held = request.num_blocks * len(self.windows)
            held -= sum(self.first_block(window, done) for _, window in self._bounded)
        else:
            hits = self.match(request)
            done = len(hits[0]) * self.block_size
            held = sum(b != NO_BLOCK and not self.pool.is_free(b) for table in hits for b in table)
        return max(self.need.blocks(done + num_tokens, done) - held, 0)

    def share(self, request: Request) -> None:
        """Give a request without a row the blocks of its longest cached prefix."""
        request.block_tables = self.match(request)
        for block_id in _held(request):
            self.pool.retain(block_id)
        request.num_published = request.num_blocks

    def grow(self, request: Request, num_tokens: int) -> list[Append]:
        """Give a request the blocks it lacks for `num_tokens` positions; returns the new ones."""
        missing = self.num_blocks_for(num_tokens) - request.num_blocks
        return [append for _ in range(missing) for append in self.add_blocks(request)]

    def add_blocks(self, request: Request) -> list[Append]:
        """Give a request one more block in each group; the caller made room for them."""
        index, appends = len(request.block_tables[0]), []
        for group, table in enumerate(request.block_tables):
            table.append(self.pool.allocate())
            appends.append((request.row, group, index, table[index]))
        return appends

    def drop_behind(self, requests: Sequence[Request]) -> None:
        """Free the blocks that no window of the positions to be planned reaches.

        Plans so far may read and write them; whatever comes into them is of a later plan. So their
        content can be shared now, and for that they stay findable.
        """
        for group, window in self._bounded:
            for request in requests:
                table = request.block_tables[group]
                start = end = self.first_block(window, request.num_scheduled)
                while start and table[start - 1] != NO_BLOCK:
                    start -= 1
                if start < end:
                    self.publish(request, min(end * self.block_size, request.num_tokens - 1))
                    self.pool.release(table[start:end])
                    table[start:end] = [NO_BLOCK] * (end - start)

    def publish(self, request: Request, num_computed: int) -> None:
        """Make the full blocks below `num_computed` findable: their KV and their ids are known."""
        first, last = request.num_published, num_computed // self.block_size
        if last <= first or not self.prefix_caching:
            return
        digests = self._digests(request, last)
        for group, table in enumerate(request.block_tables):
            for index in range(first, last):
                if table[index] != NO_BLOCK:
                    self.pool.publish(table[index], (digests[index], group))
        request.num_published = last

    def release(self, request: Request) -> None:
        """Take a request's blocks back. Plans already submitted read them before any later one."""
        self.pool.release(_held(request))
        request.block_tables = []
        request.num_published = 0

    def _digests(self, request: Request, num_blocks: int) -> list[bytes]:
        """The digests of a request's blocks: those of the first `num_blocks`, which must be full.

        And of no others: a later look-up never asks for fewer blocks than an earlier one.
        """
        digests = request.digests
        if len(digests) < num_blocks:
            size = self.block_size
            ids = request.token_ids if request.row < 0 else request.table.token_ids[request.row]
            salt = request.cache_salt  # By another seed: it may spell a digest and ids.
            digest = digests[-1] if digests else xxhash.xxh3_128_digest(salt, seed=1)
            for i in range(len(digests), num_blocks):
                digest = xxhash.xxh3_128_digest(digest + ids[i * size : (i + 1) * size].tobytes())
                digests.append(digest)
        return digests


def _held(request: Request) -> list[int]:
    """The blocks of a request in all groups, in the order of the tokens that they hold."""
    by_place = zip(*request.block_tables, strict=True)
    return [block for blocks in by_place for block in blocks if block != NO_BLOCK]
