"""Which part of a model one rank holds: its layers, its experts, its rows and columns.

Follows Megatron-LM's rules: stages of as many layers each, heads and gates split by tensor parallelism,
whole experts by expert parallelism, a vocabulary padded until it divides. Pure numbers: knows neither
process groups nor tensors.
"""

import math
from typing import Final

from msgspec import Struct

from megallm.models.checkpoint import Hyperparameters

_VOCABULARY_MULTIPLE: Final = 128
"""Of a padded vocabulary each tensor-parallel rank has a multiple, as megatron trains them."""


class Place(Struct, frozen=True):
    """A rank's place among those that split something between them."""

    rank: int = 0
    size: int = 1

    def share(self, total: int) -> range | None:
        """Gives the rank's part of `total` things, which divides; None where it has all of them."""
        each = total // self.size
        return None if self.size == 1 else range(self.rank * each, (self.rank + 1) * each)


class Sizes(Struct, frozen=True):
    """Over how many ranks a model is split, in each way; megatron's data parallelism has the rest."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    """Ranks that split each expert, megatron's expert tensor parallelism."""

    @classmethod
    def asked(cls, tp: int, pp: int, ep: int) -> "Sizes":
        """Gives the sizes with the experts spread over the tensor-parallel ranks before any others.

        Raises: ValueError for a size below 1.
        """
        for name, size in (("tp", tp), ("pp", pp), ("ep", ep)):
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be 1 or more")
        return cls(tp, pp, ep, tp // ep if tp % ep == 0 else 1)

    def check_world(self, num_ranks: int) -> None:
        """Refuses a number of processes that the sizes don't divide.

        Raises: ValueError naming the sizes, the number and the remedy.
        """
        needed = math.lcm(self.tp * self.pp, self.ep * self.etp * self.pp)
        if num_ranks % needed:
            raise ValueError(
                f"tp={self.tp}, pp={self.pp} and ep={self.ep} need a multiple of {needed} processes, and "
                f"there are {num_ranks}; start {needed}, as with torchrun --nproc-per-node {needed}, or "
                "choose smaller sizes"
            )

    def check_model(self, size: Hyperparameters) -> None:
        """Refuses sizes that don't divide what they split.

        Raises: ValueError naming the size, the number and the sizes that are possible.
        """
        split = _split_things(size)
        for name, things in split.items():
            ranks: int = getattr(self, name)
            for what, total in things.items():
                if total % ranks:
                    common = math.gcd(*things.values())
                    possible = [str(each) for each in range(1, common + 1) if common % each == 0]
                    raise ValueError(
                        f"{name} is {ranks} and does not divide the model's {total:,} {what}; it can be "
                        f"{', '.join(possible)}"
                    )


def _split_things(size: Hyperparameters) -> dict[str, dict[str, int]]:
    """Gives, for each of the sizes, the numbers that it has to divide."""
    by_tp = {"attention heads": size.num_heads, "KV groups": size.num_kv_heads}
    if size.experts is None or size.experts.dense_layers:
        by_tp["rows in the MLP"] = size.ffn_size
    if size.is_qk_norm_joint:
        by_tp["norm over all heads"] = 1
    split = {"pp": {"layers": size.num_layers}, "tp": by_tp}
    if size.experts is not None:
        if size.experts.shared_ffn_size:
            by_tp["rows in the shared expert"] = size.experts.shared_ffn_size
        split["ep"] = {"experts": size.experts.num_experts}
        split["etp"] = {"rows in each expert": size.experts.ffn_size}
        if size.experts.has_bias:
            split["etp"]["bias of each expert"] = 1  # every rank would add it
    return split


class RankPart(Struct, frozen=True):
    """The part of a model that one rank holds; by default all of it."""

    tp: Place = Place()
    pp: Place = Place()
    ep: Place = Place()
    etp: Place = Place()
    """Among the ranks that split each of this rank's experts."""

    @property
    def sizes(self) -> Sizes:
        """Gives the sizes."""
        return Sizes(self.tp.size, self.pp.size, self.ep.size, self.etp.size)

    @property
    def has_embedding(self) -> bool:
        """Whether tokens come in at this rank: it is of the first stage."""
        return self.pp.rank == 0

    @property
    def has_output(self) -> bool:
        """Whether logits come out of this rank: it is of the last stage."""
        return self.pp.rank == self.pp.size - 1

    def layers(self, num_layers: int) -> range:
        """Gives the layers of the rank's stage, counted from 0."""
        return self.pp.share(num_layers) or range(num_layers)

    def experts(self, num_experts: int) -> range:
        """Gives the rank's experts, counted from 0."""
        return self.ep.share(num_experts) or range(num_experts)

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Gives the rows that all ranks' embeddings have together."""
        if vocab_size % self.tp.size == 0:
            return vocab_size
        multiple = _VOCABULARY_MULTIPLE * self.tp.size
        return -(-vocab_size // multiple) * multiple

    def vocabulary(self, vocab_size: int) -> range | None:
        """Gives the token ids in the rank's part of the embedding, without padding; None for all of them."""
        rows = self.tp.share(self.padded_vocab_size(vocab_size))
        return None if rows is None else range(min(rows.start, vocab_size), min(rows.stop, vocab_size))
