"""What is fair between client requests: who joins, who gives way, and what a pass reads. No clock, no state, no engine.

A request counts once, however many sequences (`n`, several prompts) it has. Requests are given as numbers in the order
of their arrival, so the least number is the oldest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


def joins(waiting: Sequence[int], running: Sequence[int]) -> int:
    """Return the place in `waiting` of who joins next: of the request that runs least, the oldest of several.

    Both hold each sequence's request, `waiting` in the order of arrival.
    """
    held = Counter(running)
    return min(range(len(waiting)), key=lambda n: held[waiting[n]])


def claims(request: int, running: Sequence[int]) -> bool:
    """Whether a request that waits may take another one's place: it runs nothing, and some request runs several."""
    held = Counter(running)
    return request not in held and max(held.values(), default=0) > 1


def gives_way(running: Sequence[int]) -> int:
    """Return the place in `running` of who leaves if one has to: of the requests that run most, the youngest sequence.

    `running` holds each sequence's request, in the order of joining. The oldest sequence leaves only if it is alone.
    """
    held = Counter(running)
    most = max(held.values())
    return max(n for n, request in enumerate(running) if held[request] == most)


@dataclass(frozen=True, slots=True)
class UnreadPrompt:
    """What a running sequence has yet to read before its next token."""

    request: int
    left: int  # tokens
    most: int  # of them, the most in one pass
    chunk: Hashable = None  # names what it reads next if that will be kept for others who read the same; else None

    @property
    def wanted(self) -> int:
        """Tokens that it would read in the next pass."""
        return min(self.left, self.most)


def shares(decoding: int, prompts: Sequence[UnreadPrompt], room: int) -> tuple[int, list[tuple[int, int]]]:
    """Share a pass of `room` tokens between `decoding` sequences, which read one each, and prompts.

    Prompts have what decoding leaves, at least half of a pass. The request with the fewest tokens left reads first, but
    the oldest has at least half of what prompts have. So a request that needs up to that half reads all of it at once
    unless there are shorter ones, and the oldest ends within twice the passes that it needs alone. Of those who read
    the same chunk one does, and the others wait.

    Returns:
        How many sequences decode, and for each prompt that is read its place in `prompts` and its number of tokens.
    """
    readers = _readers(prompts)
    wanted = sum(prompts[n].wanted for n in readers)
    left = min(wanted, max(room - decoding, (room + 1) // 2))
    decodes = min(decoding, room - left)
    oldest = min((one.request for one in prompts), default=0)
    held_back = min(_wanted(prompts, readers, oldest), (left + 1) // 2)
    given = []
    for n in readers:
        if prompts[n].request == oldest:
            held_back = 0
        count = min(prompts[n].wanted, left - held_back)
        if count:
            given.append((n, count))
            left -= count
    return decodes, given


def _readers(prompts: Sequence[UnreadPrompt]) -> list[int]:
    """Return the places of the prompts that read and do not wait for another one's chunk, in the order of reading."""
    firsts: dict[Hashable, int] = {}  # who reads a chunk, of those of one request
    for n, one in enumerate(prompts):
        firsts.setdefault((one.request, n if one.chunk is None else one.chunk), n)
    left: Counter[int] = Counter()
    for n in firsts.values():
        left[prompts[n].request] += prompts[n].left
    order = sorted(firsts.values(), key=lambda n: (left[prompts[n].request], prompts[n].request))
    oldest = min(left, default=0)
    begun = {prompts[n].chunk for n in order if prompts[n].request == oldest}
    readers = []
    for n in order:
        one = prompts[n]
        if one.request != oldest and one.chunk is not None:
            if one.chunk in begun:
                continue
            begun.add(one.chunk)
        readers.append(n)
    return readers


def _wanted(prompts: Sequence[UnreadPrompt], readers: Sequence[int], request: int) -> int:
    return sum(prompts[n].wanted for n in readers if prompts[n].request == request)
