# SPDX-License-Identifier: Apache-2.0
"""What holds groups of pages: an LRU of so many tokens, and a link that serves one transfer after the other."""
import collections


class Lru:
    """Groups by key, with how many of their tokens are held; the least recently used leave first."""

    def __init__(self, capacity_tokens):
        self.capacity, self.used, self.evicted = capacity_tokens, 0, 0
        self._held = collections.OrderedDict()

    def get(self, key):
        """Tokens held of a group, which counts as used; 0: not there."""
        tokens = self._held.get(key, 0)
        if tokens:
            self._held.move_to_end(key)
        return tokens

    def has(self, key):
        return self._held.get(key, 0)

    def put(self, key, tokens):
        """Tokens that are new."""
        before = self._held.get(key, 0)
        if tokens > before:
            self._held[key] = tokens
            self.used += tokens - before
        if before or tokens:
            self._held.move_to_end(key)
        while self.used > self.capacity:
            self.used -= self._held.popitem(last=False)[1]
            self.evicted += 1
        return max(0, tokens - before)


class Link:
    """Bytes in the order of their arrival, at a rate."""

    def __init__(self, bytes_per_second):
        self.rate, self.free_at, self.bytes = bytes_per_second, 0.0, 0

    def done(self, now, size):
        """When a transfer that is asked for now has ended."""
        self.free_at = max(self.free_at, now) + size / self.rate
        self.bytes += size
        return self.free_at

    def wait(self, now):
        return max(0.0, self.free_at - now)
