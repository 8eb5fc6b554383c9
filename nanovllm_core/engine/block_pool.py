"""The blocks of the KV cache: who holds which, and which content can be found again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from nanovllm_core.errors import InconsistentStateError

NO_BLOCK = -1
"""Stands in block tables for a block that was freed, and for content that is not found."""

Content = tuple[bytes, int]
"""The digest of all tokens up to a block's last, and the cache group that it is of."""


class BlockPool:
    """Reference-counted blocks with an index of published content.

    A block is free when no request holds it. A free block whose content was published stays
    findable until it is allocated again; the block that was freed longest ago is allocated first,
    and blocks with nothing to find come before all others.

    `allocate` and `retain` take blocks, `release` gives them back.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._content_of: dict[int, Content] = {}
        self._block_of: dict[Content, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, block_id: int) -> bool:
        return self._holders[block_id] == 0

    def allocate(self) -> int:
        """Take one free block; what was published of it is forgotten. The caller checks `num_free`.

        Raises `InconsistentStateError` where no block is free.
        """
        if not self._free:
            raise InconsistentStateError(
                f"a block was taken although all {self.num_blocks} are held; the planner must make "
                "room first"
            )
        block_id, _ = self._free.popitem(last=False)
        content = self._content_of.pop(block_id, None)
        if content is not None:
            del self._block_of[content]
        self._holders[block_id] = 1
        return block_id

    def retain(self, block_id: int) -> None:
        """Hold a block that others may hold too; a free one is free no longer."""
        if self._holders[block_id] == 0:
            del self._free[block_id]
        self._holders[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give blocks back, in the order of the tokens that they hold.

        Of published blocks the last is allocated again before the first: a prefix is worth more
        than what follows it. What lies before a window was released earlier, and goes before all:
        until it is gone the whole sequence is found, then, without one block more, nothing of it.
        """
        for block_id in reversed(block_ids):
            holders = self._holders[block_id] - 1
            if holders < 0:
                raise InconsistentStateError(f"block {block_id} was released by nobody who held it")
            self._holders[block_id] = holders
            if holders == 0:
                self._free[block_id] = None
                if block_id not in self._content_of:
                    self._free.move_to_end(block_id, last=False)

    def publish(self, block_id: int, content: Content) -> None:
        """Make a held block findable. A second block of the same content stays private."""
        if content not in self._block_of and block_id not in self._content_of:
            self._block_of[content] = block_id
            self._content_of[block_id] = content

    def find(self, content: Content) -> int:
        """The block with this content, held or free; `NO_BLOCK` where there is none."""
        return self._block_of.get(content, NO_BLOCK)

    def forget(self) -> None:
        """Make no published content findable any more; who holds what does not change."""
        self._content_of.clear()
        self._block_of.clear()

    def faults(self, block_tables: Iterable[Sequence[int]]) -> Iterator[str]:
        """Broken invariants, given the blocks of each live request; nothing where all is right."""
        expected: Counter[int] = Counter()
        for block_ids in block_tables:
            if len(set(block_ids)) != len(block_ids):
                yield f"a request names a block twice: {block_ids}"
            expected.update(block_ids)
        for block_id, holders in enumerate(self._holders):
            named, is_listed = expected[block_id], block_id in self._free
            if holders != named:
                yield f"block {block_id} counts {holders} holders, {named} requests name it"
            if (holders == 0) != is_listed:
                place = "on" if is_listed else "not on"
                yield f"block {block_id} has {holders} holders but is {place} the free list"
        if {block: content for content, block in self._block_of.items()} != self._content_of:
            yield "the index of published blocks contradicts itself"
