"""What is asked of a simulated service: a made-up stream of requests, or one that was recorded.

A recorded trace has one JSON object a line: `timestamp` in milliseconds, `input_length` and
`output_length` in tokens, and `hash_ids`, a number for each 512 tokens of the prompt, equal where
prompts begin alike (the format of Mooncake's traces; `hash_ids` may be left out).
"""

import json
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec import Struct

from benchmarks.load import SEED
from megallm.core_async.messages import Ints

HASH_TOKENS = 512
"""Tokens that one of a trace's `hash_ids` stands for."""
VOCAB_SIZE = 100_000


class Arrival(Struct, frozen=True):
    """A request, and when it comes."""

    time_s: float
    prompt: Ints
    num_new: int
    num_shared: int = 0
    """Tokens at the beginning that are a system prompt's."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt) // 4


class Synthetic(Struct, frozen=True):
    """A made-up stream: arrivals as in a Poisson process, lengths uniform from half to one and a half.

    Of a prompt that begins with a system prompt, only what follows that has its length drawn.
    """

    num_requests: int
    rate: float
    """Requests a second."""
    input_length: int
    """Tokens of a prompt, the shared ones included, on the average."""
    output_length: int
    shared_share: float = 0.0
    """Share of the requests that begin with one of the system prompts."""
    shared_length: int = 0
    """Tokens of a system prompt."""
    num_shared: int = 1
    """Different system prompts."""
    shared_beginning: int = 0
    """Tokens of them that are the same in all."""
    shared_skew: float = 0.0
    """The n-th of them is asked for in proportion to n ** -skew (Zipf's law); 0: all alike."""

    def arrivals(self) -> Iterator[Arrival]:
        """Gives the requests in order; the same each time."""
        random = np.random.default_rng(SEED)
        systems = random.integers(VOCAB_SIZE, size=(self.num_shared, self.shared_length), dtype=np.int32)
        systems[:, : self.shared_beginning] = systems[0, : self.shared_beginning]
        times = np.cumsum(random.exponential(1 / self.rate, self.num_requests))
        wholes = _spread(random, self.input_length, self.num_requests)
        rests = _spread(random, max(1, self.input_length - self.shared_length), self.num_requests)
        outputs = _spread(random, self.output_length, self.num_requests)
        shares = random.random(self.num_requests) < self.shared_share
        popularity = np.arange(1, self.num_shared + 1) ** -self.shared_skew
        which = random.choice(self.num_shared, self.num_requests, p=popularity / popularity.sum())
        for number in range(self.num_requests):
            head = systems[which[number]].tobytes() if shares[number] else b""
            num_own = int((rests if shares[number] else wholes)[number])
            own = random.integers(VOCAB_SIZE, size=num_own, dtype=np.int32).tobytes()
            yield Arrival(float(times[number]), Ints(head + own), int(outputs[number]), len(head) // 4)


def _spread(random: np.random.Generator, mean: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return random.integers(max(1, mean // 2), max(2, mean + mean // 2 + 1), size=count)


class Recorded(Struct, frozen=True):
    """A recorded trace."""

    path: Path
    num_requests: int
    """At most: the first of them."""
    speed: float = 1.0
    """How many times as fast it is played."""
    max_length: int = 1 << 30
    """Tokens of prompt and output together; longer ones are cut."""

    def arrivals(self) -> Iterator[Arrival]:
        """Gives the requests in order.

        Raises: ValueError naming the line that is none.
        """
        with self.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                if number >= self.num_requests:
                    return
                yield self._arrival(number, line)

    def _arrival(self, number: int, line: str) -> Arrival:
        try:
            row = json.loads(line)
            time_s, length, num_new = row["timestamp"], row["input_length"], row["output_length"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path.name}, line {number + 1}: {error!r}; a line must be a JSON object with"
                " timestamp, input_length and output_length"
            ) from error
        num_new = max(1, min(num_new, self.max_length - 1))
        length = max(1, min(length, self.max_length - num_new))
        tokens = array("i")
        for hash_id in row.get("hash_ids", ()):
            tokens.extend(array("i", [1 + hash_id % (1 << 30)]) * HASH_TOKENS)
        tokens = tokens[:length]
        tail = np.random.default_rng((SEED, number)).integers(VOCAB_SIZE, size=length - len(tokens))
        tokens.extend(array("i", tail.astype(np.int32).tobytes()))
        return Arrival(time_s / 1e3 / self.speed, Ints(tokens.tobytes()), num_new)
