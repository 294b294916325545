"""The work that suites ask for: cases by name, and prompts of random token ids.

A case is `PROMPTS:IN:OUT`, so many prompts at once, of IN ids each, OUT tokens each, or one of the
names in `NAMED`. The same case is the same work every time, on every machine. Knows no engine.
"""

import random
from typing import Final, Self

from msgspec import Struct

SEED: Final = 0


class Case(Struct, frozen=True):
    """Prompts that come all at once: the length of each, and how many tokens each is to give."""

    name: str
    prompt_lengths: tuple[int, ...]
    output_lengths: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Gives the case of a name or of `PROMPTS:IN:OUT`.

        Raises: ValueError naming the text and what it must be.
        """
        spec = NAMED.get(text, text)
        if spec == "mix":
            generator = random.Random(SEED)
            lengths = [(generator.randint(100, 1024), generator.randint(100, 1024)) for _ in range(256)]
            return cls(text, *zip(*lengths, strict=True))
        numbers = spec.split(":")
        if len(numbers) != 3 or not all(part.isdecimal() and int(part) for part in numbers):  # noqa: PLR2004 - as many as are named below
            raise ValueError(
                f"case is {text!r}; it must be PROMPTS:IN:OUT, three numbers from 1 up, or {', '.join(NAMED)}"
            )
        num_prompts, prompt_length, output_length = map(int, numbers)
        return cls(text, (prompt_length,) * num_prompts, (output_length,) * num_prompts)

    @property
    def num_prompts(self) -> int:
        """How many prompts come."""
        return len(self.prompt_lengths)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.prompt_lengths)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(self.output_lengths)

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Gives the prompts, random ids below `vocab_size`."""
        return random_prompts(self.prompt_lengths, vocab_size)


NAMED: Final = {"prefill": "8:512:1", "mix": "mix"}
"""`prefill` gives one token a prompt; `mix` is 256 prompts, in and out lengths uniform in 100..1024."""


def random_prompts(lengths: tuple[int, ...], vocab_size: int) -> list[list[int]]:
    """Gives one prompt of random ids a length. No two begin alike: no prefix cache shortens the work."""
    generator = random.Random(SEED)
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]
