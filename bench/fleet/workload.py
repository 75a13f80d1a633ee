# SPDX-License-Identifier: Apache-2.0
"""Requests of a chat service, in the shape of a published trace.

The shape is that of the conversation trace which Mooncake released (R. Qin et al., "Mooncake", FAST 2025; one hour
of Kimi): 12,031 requests, prompts of 12,035 tokens and answers of 343 in the mean, 40 % of the prompts' tokens in an
earlier request's. Nothing of the trace itself is here: lengths and pauses are log-normal, turns are geometric, and
`python3 -m fleet --shape` prints what they come to.
"""
import dataclasses
import heapq
import itertools
import math
import random

GROUP_TOKENS = 4096  # what leaves a tier at once: 256 pages of 16 tokens


@dataclasses.dataclass(frozen=True)
class Shape:
    """Means and spreads; lengths in tokens, times in seconds."""
    first_median: float = 5700     # median of a conversation's first prompt
    first_sigma: float = 1.25      # deviation of its logarithm
    longest: int = 128_000
    added_median: float = 160      # what a user adds in a later turn
    added_sigma: float = 1.2
    answer: float = 343            # mean, exponential
    go_on: float = 0.405           # chance of one more turn
    pause_median: float = 110      # from a turn's arrival to the next one's
    pause_sigma: float = 1.0
    shared: float = 0.05           # share of conversations that begin with a document others have too
    documents: int = 2000          # shared documents, drawn by Zipf's law


@dataclasses.dataclass(slots=True)
class Request:
    time: float
    conversation: int
    turn: int
    home: int        # where its conversation was last, or -1
    tokens: int      # tokens of the prompt
    document: int    # whose first `document_tokens` it has, or -1
    document_tokens: int

    def groups(self):
        """((key, tokens), ...) of the prompt's groups, first to last; the last one may be part of a group."""
        shared = self.document_tokens // GROUP_TOKENS
        for i in range(-(-self.tokens // GROUP_TOKENS)):
            key = (0, self.document, i) if i < shared else (1, self.conversation, i)
            yield key, min(GROUP_TOKENS, self.tokens - i * GROUP_TOKENS)


def requests(shape, rate, seconds, seed):
    """Yields Requests in the order of their times; `rate` of them a second in the mean."""
    rng = random.Random(seed)
    lengths = [min(int(rng.lognormvariate(math.log(shape.first_median), shape.first_sigma)), shape.longest)
               for _ in range(shape.documents)]
    zipf = list(itertools.accumulate(1 / (i + 1) for i in range(shape.documents)))
    begins = rate * (1 - shape.go_on)
    later, numbers = [], itertools.count()
    next_begin = rng.expovariate(begins)
    while True:
        if later and later[0][0] <= next_begin:
            request = heapq.heappop(later)[2]
        else:
            request = _first(shape, next_begin, next(numbers), lengths, zipf, rng)
            next_begin += rng.expovariate(begins)
        if request.time > seconds:
            return
        yield request
        if rng.random() < shape.go_on:
            following = _following(shape, request, rng)
            heapq.heappush(later, (following.time, following.conversation, following))


def _first(shape, time, conversation, lengths, zipf, rng):
    tokens = max(64, int(rng.lognormvariate(math.log(shape.first_median), shape.first_sigma)))
    document, held = -1, 0
    if rng.random() < shape.shared:
        document = rng.choices(range(len(lengths)), cum_weights=zipf)[0]
        held = lengths[document]
        tokens = held + 200
    return Request(time, conversation, 0, -1, min(tokens, shape.longest), document, held)


def _following(shape, request, rng):
    added = rng.expovariate(1 / shape.answer) + rng.lognormvariate(math.log(shape.added_median), shape.added_sigma)
    return dataclasses.replace(request, turn=request.turn + 1,
                               time=request.time + rng.lognormvariate(math.log(shape.pause_median), shape.pause_sigma),
                               tokens=min(request.tokens + 1 + int(added), shape.longest))
