"""A small stand-in for the scheduler: writes step plans for a runner, with blocks in scattered order."""

import random
from dataclasses import dataclass, field

from megallm.core_async.config import EngineConfig
from megallm.core_async.device.kv_cache import num_blocks_for
from megallm.core_async.device.runner import TorchRunner
from megallm.core_async.messages import (
    Row,
    RowSetup,
    Sampling,
    StepPlan,
    StepResult,
    TopLogProbs,
    pack_ints,
    unpack_floats,
    unpack_ints,
)

GREEDY = Sampling(temperature=0.0)


def engine_config(**changes: int | str) -> EngineConfig:
    """Gives limits for the small models, changed."""
    limits: dict[str, int | str] = {
        "block_size": 4,
        "num_blocks": 64,
        "max_requests": 8,
        "max_tokens": 256,
        "max_sequence_length": 64,
        "vocab_size": 96,
        **changes,
    }
    return EngineConfig(**limits)  # pyright: ignore[reportArgumentType] - one dict for ints and names


@dataclass
class Sequence:
    """One request in its row: what is known of its tokens, and what is computed."""

    row: Row
    prompt_length: int
    tokens: list[int]
    sampling: Sampling
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    score_top: list[list[tuple[int, float]]] = field(default_factory=list)
    scores_prompt: bool = False
    masked_ids: tuple[int, ...] = ()
    masked_until: int = 0
    is_on_device: bool = False
    """Its newest token was sampled by this row, so the rank knows it."""
    is_set_up: bool = False

    @property
    def output(self) -> list[int]:
        """The sampled tokens."""
        return self.tokens[self.prompt_length :]

    def setup(self) -> RowSetup:
        """Gives what the rank has to know."""
        return RowSetup(
            row=self.row,
            sampling=self.sampling,
            num_prompt=self.prompt_length,
            known=pack_ints(self.tokens),
            masked_ids=self.masked_ids,
            masked_until=self.masked_until,
        )

    def targets(self, start: int, length: int) -> list[int]:
        """Gives the prompt token after each of some tokens; -1 after the prompt's last."""
        following = self.tokens[start + 1 : min(start + length + 1, self.prompt_length)]
        return following + [-1] * (length - len(following))

    @property
    def num_pending(self) -> int:
        """Tokens known, or on the device, and not computed."""
        return len(self.tokens) - self.num_computed


class Planner:
    """Owns the free blocks and rows, and drives one runner."""

    def __init__(self, runner: TorchRunner, config: EngineConfig, *, seed: int = 0) -> None:
        self.runner = runner
        self._config = config
        self._step = 0
        shuffled = random.Random(seed)
        self._free_blocks = list(range(config.num_blocks))
        self._free_rows = [Row(row) for row in range(config.max_requests)]
        shuffled.shuffle(self._free_blocks)
        shuffled.shuffle(self._free_rows)

    @property
    def free_blocks(self) -> list[int]:
        """Blocks that no sequence owns."""
        return list(self._free_blocks)

    def add(self, prompt: list[int], sampling: Sampling = GREEDY, *, scores_prompt: bool = False) -> Sequence:
        """Gives a prompt a row."""
        return Sequence(
            row=self._free_rows.pop(),
            prompt_length=len(prompt),
            tokens=list(prompt),
            sampling=sampling,
            scores_prompt=scores_prompt,
        )

    def remove(self, sequence: Sequence) -> None:
        """Gives a sequence's row and blocks to others."""
        self._free_rows.append(sequence.row)
        self.preempt(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks; it computes all its tokens again."""
        self._free_blocks[:0] = sequence.blocks
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.is_on_device = False
        sequence.is_set_up = False

    def plan(self, work: list[tuple[Sequence, int]]) -> tuple[StepPlan, list[Sequence]]:
        """Gives the plan that computes so many tokens of each sequence, and those that sample, in order."""
        decode = [part for part in work if part[0].is_on_device and part[0].num_pending == 1]
        chunks = [part for part in work if part not in decode]
        changed: list[tuple[int, int, list[int]]] = []
        new_rows: list[RowSetup] = []
        tokens: list[int] = []
        targets: list[int] = []
        ordered = decode + chunks
        starts = [sequence.num_computed for sequence, _ in ordered]
        for sequence, count in ordered:
            needed = num_blocks_for(sequence.num_computed + count, self._config.block_size) - len(
                sequence.blocks
            )
            if needed > 0:
                taken = [self._free_blocks.pop() for _ in range(needed)]
                changed.append((sequence.row, len(sequence.blocks), taken))
                sequence.blocks += taken
            if not sequence.is_set_up:
                new_rows.append(sequence.setup())
                sequence.is_set_up = True
            if (sequence, count) in chunks:
                tokens += sequence.tokens[sequence.num_computed : sequence.num_computed + count]
            if sequence.scores_prompt:
                targets += sequence.targets(sequence.num_computed, count)
            sequence.num_computed += count
        samples = [sequence.num_pending == 0 for sequence, _ in ordered]
        self._step += 1
        plan = StepPlan(
            step=self._step,
            num_decode=len(decode),
            rows=pack_ints([sequence.row for sequence, _ in ordered]),
            starts=pack_ints(starts),
            lengths=pack_ints([count for _, count in ordered]),
            samples=bytes(samples),
            tokens=pack_ints(tokens),
            new_rows=new_rows,
            changed_rows=pack_ints([row for row, _, _ in changed]),
            changed_starts=pack_ints([start for _, start, _ in changed]),
            changed_counts=pack_ints([len(taken) for _, _, taken in changed]),
            blocks=pack_ints([block for _, _, taken in changed for block in taken]),
            scored=bytes(sequence.scores_prompt for sequence, _ in ordered),
            targets=pack_ints(targets),
        )
        return plan, [sequence for (sequence, _), takes in zip(ordered, samples, strict=True) if takes]

    def step(self, *work: tuple[Sequence, int]) -> StepResult:
        """Runs one step and appends what it gave to the sequences."""
        before = {sequence.row: sequence.num_computed for sequence, _ in work}
        plan, sampling = self.plan(list(work))
        result = self.runner.launch(plan).result()
        sampled, log_probs, top = (
            unpack_ints(result.tokens),
            unpack_floats(result.log_probs),
            _places(result.top),
        )
        assert len(sampled) == len(sampling)
        for place, sequence in enumerate(sampling):
            sequence.tokens.append(sampled[place])
            sequence.is_on_device = True
            sequence.log_probs += log_probs[place : place + 1]
            sequence.top += top[place : place + 1]
        scores, score_top, place = unpack_floats(result.scores), _places(result.score_top), 0
        by_row = {sequence.row: (sequence, count) for sequence, count in work}
        for sequence, count in (by_row[Row(row)] for row in unpack_ints(plan.rows)):
            if sequence.scores_prompt:
                end = place + count - sequence.targets(before[sequence.row], count).count(-1)
                sequence.scores += scores[place:end]
                sequence.score_top += score_top[place:end]
                place = end
        assert place == len(scores)
        return result

    def decode(self, *sequences: Sequence, num_steps: int) -> None:
        """Runs steps that compute all that is pending of each sequence."""
        for _ in range(num_steps):
            self.step(*((sequence, sequence.num_pending) for sequence in sequences))


def _places(top: TopLogProbs | None) -> list[list[tuple[int, float]]]:
    if top is None:
        return []
    pairs = list(zip(unpack_ints(top.ids), unpack_floats(top.log_probs), strict=True))
    return [pairs[start : start + top.num_top] for start in range(0, len(pairs), top.num_top)]
