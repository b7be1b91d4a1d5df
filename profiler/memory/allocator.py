"""A model of PyTorch's caching allocator on one stream.

The rules are those of PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp): sizes are
rounded up to 512 bytes; requests up to 1 MiB come from segments of 2 MiB, those under 10 MiB from
segments of 20 MiB, larger ones from segments of their own rounded up to 2 MiB; the best fitting
free block is taken and split, neighbors merge when freed, and unused segments are returned only
after cuDNN's search for the fastest algorithm and on a full device. So reserved memory includes
rounding and fragmentation, and a step runs on less than it reserves. With `expandable_segments`,
each of the two kinds has one segment that grows by pages instead.
"""

from __future__ import annotations

from bisect import bisect_left, insort

Block = tuple[int, int]
"""Address and size of a block, in units of 512 bytes."""

MIB = 1 << 20
UNIT = 512
"""Unit of all sizes and addresses within the allocator, in bytes."""
MIB_UNITS = MIB // UNIT
_ADDRESS_BITS = 48
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class Allocator:
    """PyTorch's caching allocator on one stream; sizes and addresses in units of 512 bytes.

    Free blocks are found by size (best fit, then lowest address), and by their borders to merge
    neighbors. Gaps between segments keep their blocks from merging.
    """

    _least_rest = MIB_UNITS
    """Largest rest of a large block that is not split off."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        """Memory of the device, which grows where an allocation would fail; None for one that is
        never full."""
        self.was_full = False
        self.live = 0
        self.peak_live = 0
        self.reserved = 0
        self.peak_reserved = 0
        self._segments: dict[int, int] = {}
        """Size of each segment by its address."""
        self._small: list[int] = []
        self._large: list[int] = []
        """Sorted free blocks, with size and address in one number."""
        self._borders: dict[int, int] = {}
        """Size of each free block by its start, and the negative size by its end."""
        self._next = 0

    def allocate(self, size: int) -> Block:
        """Return a block of at least this size, which must not be 0."""
        small = size <= MIB_UNITS
        pool = self._small if small else self._large
        at = bisect_left(pool, size << _ADDRESS_BITS)
        if at < len(pool):
            block = pool.pop(at)
            address, have = block & _ADDRESS, block >> _ADDRESS_BITS
            del self._borders[address], self._borders[address + have]
        else:
            address, have = self._extend(size)
        rest = have - size
        if rest > (0 if small else self._least_rest):
            tail = address + size
            self._borders[tail] = rest
            self._borders[tail + rest] = -rest
            insort(pool, rest << _ADDRESS_BITS | tail)
            have = size
        self.live += have
        if self.live > self.peak_live:  # noqa: PLR1730  (called 10,000 times a step)
            self.peak_live = self.live
        return address, have

    def _extend(self, size: int) -> Block:
        """Return a free block of at least this size in memory taken from the device."""
        have = _segment(size)
        self._reserve(have)
        address = self._next
        self._next += have + 1
        self._segments[address] = have
        return address, have

    def _reserve(self, size: int) -> None:
        """Take memory from the device, after unused memory is returned if it is full."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            self.was_full = True
            self.give_back()
            self.capacity = max(self.capacity, self.reserved + size)
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, block: Block) -> None:
        address, size = block
        self.live -= size
        pool = self._small if size <= MIB_UNITS else self._large
        borders = self._borders
        end = address + size
        after = borders.pop(end, 0)
        if after:
            pool.pop(bisect_left(pool, after << _ADDRESS_BITS | end))
            end += after
        before = -borders.pop(address, 0)
        if before:
            address -= before
            pool.pop(bisect_left(pool, before << _ADDRESS_BITS | address))
        size = end - address
        borders[address] = size
        borders[end] = -size
        insort(pool, size << _ADDRESS_BITS | address)

    def give_back(self) -> None:
        """Return unused segments to the device (`empty_cache`)."""
        for pool in (self._small, self._large):
            for block in pool.copy():
                address, size = block & _ADDRESS, block >> _ADDRESS_BITS
                if self._segments.get(address) == size:
                    pool.remove(block)
                    del self._borders[address], self._borders[address + size]
                    del self._segments[address]
                    self.reserved -= size


class ExpandableAllocator(Allocator):
    """The allocator with `expandable_segments:True`: one segment for small blocks, one for large.

    A segment grows at its end by pages of 2 or 20 MiB, which the free block before the end joins.
    All blocks are split exactly. A full device takes back the free pages at the segments' ends;
    PyTorch also takes free pages between blocks.
    """

    _least_rest = 0

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._ends = [0, 1 << (_ADDRESS_BITS - 1)]
        """End of each segment: that of small blocks, and that of large ones."""

    def _extend(self, size: int) -> Block:
        which = int(size > MIB_UNITS)
        last, pages = self._growth(which, size)
        if self.capacity is not None and self.reserved + pages > self.capacity:
            self.was_full = True
            self.give_back()  # which may shorten this segment
            last, pages = self._growth(which, size)
        self._reserve(pages)
        end = self._ends[which]
        self._ends[which] += pages
        if last:
            self._remove(which, end - last, last)
        return end - last, last + pages

    def _growth(self, which: int, size: int) -> tuple[int, int]:
        """Return the size of the free block at the end, and that of the pages that it lacks."""
        last = -self._borders.get(self._ends[which], 0)
        page = _PAGES[which]
        return last, -(-(size - last) // page) * page

    def give_back(self) -> None:
        for which, page in enumerate(_PAGES):
            end = self._ends[which]
            last = -self._borders.get(end, 0)
            pages = last // page * page
            if pages:
                self._ends[which] -= pages
                self.reserved -= pages
                self._remove(which, end - last, last)
                if last > pages:
                    self._insert(which, end - last, last - pages)

    def _remove(self, which: int, address: int, size: int) -> None:
        pool = self._large if which else self._small
        pool.pop(bisect_left(pool, size << _ADDRESS_BITS | address))
        del self._borders[address], self._borders[address + size]

    def _insert(self, which: int, address: int, size: int) -> None:
        insort(self._large if which else self._small, size << _ADDRESS_BITS | address)
        self._borders[address], self._borders[address + size] = size, -size


_PAGES = 2 * MIB_UNITS, 20 * MIB_UNITS
"""Pages of expandable segments of small and of large blocks (`kSmallBuffer`, `kLargeBuffer`)."""


def _segment(size: int) -> int:
    if size <= MIB_UNITS:
        return 2 * MIB_UNITS
    if size < 10 * MIB_UNITS:
        return 20 * MIB_UNITS
    return (size + 2 * MIB_UNITS - 1) // (2 * MIB_UNITS) * (2 * MIB_UNITS)
