"""Fakes for the engine's seams: a runner that is a tiny deterministic model, a worker without a thread, a tokenizer."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

import anyio

from megallm.core_async.kit.actor import Actor
from megallm.core_async.messages import (
    CollectStep,
    LaunchStep,
    Row,
    StepPlan,
    StepResult,
    pack_ints,
    unpack_ints,
)
from megallm.core_async.protocols import PendingStep, Runner

VOCAB_SIZE = 97


def next_token(tokens: Sequence[int]) -> int:
    """Gives the fake model's greedy choice after `tokens`: it depends on all of them and on their order."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCAB_SIZE


def continuation(prompt: Sequence[int], num_tokens: int, stop_ids: Sequence[int] = ()) -> list[int]:
    """Gives what the fake model generates after a prompt, the id that ends it included."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class FakePending:
    """A step that has run."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class FakeRunner:
    """A runner whose cache holds token ids: it computes from its block tables and slots alone.

    A wrong block table, a slot written by two rows or a stale last token gives other tokens.
    """

    def __init__(self, *, num_blocks: int = 64, block_size: int = 4, max_requests: int = 16) -> None:
        self._block_size = block_size
        self._slots: list[int | None] = [None] * (num_blocks * block_size)
        self._tables: dict[Row, dict[int, int]] = {Row(row): {} for row in range(max_requests)}
        self._last_tokens: dict[Row, int] = {}
        self.plans: list[StepPlan] = []
        self.is_started = False
        self.is_closed = False
        self.before_launch: Callable[[StepPlan], None] = lambda plan: None
        """Runs before each step; raises to kill the forward pass."""

    def start(self) -> None:
        self.is_started = True

    def close(self) -> None:
        self.is_closed = True

    def launch(self, plan: StepPlan) -> PendingStep:
        self.before_launch(plan)
        self.plans.append(plan)
        self._apply_changes(plan)
        given = iter(unpack_ints(plan.tokens))
        sampled: list[int] = []
        columns = zip(
            unpack_ints(plan.rows),
            unpack_ints(plan.starts),
            unpack_ints(plan.lengths),
            plan.samples,
            strict=True,
        )
        for index, (row, start, length, is_sampling) in enumerate(columns):
            for position in range(start, start + length):
                token = self._last_tokens[Row(row)] if index < plan.num_decode else next(given)
                self._slots[self._slot(Row(row), position)] = token
            if is_sampling:
                context = [self._slots[self._slot(Row(row), p)] for p in range(start + length)]
                assert None not in context, f"row {row} reads a slot that nobody wrote: {context}"
                token = next_token([token for token in context if token is not None])
                self._last_tokens[Row(row)] = token
                sampled.append(token)
        assert next(given, None) is None, "the plan gives more tokens than its rows take"
        return FakePending(StepResult(plan.step, pack_ints(sampled)))

    def _apply_changes(self, plan: StepPlan) -> None:
        blocks = iter(unpack_ints(plan.blocks))
        for setup in plan.new_rows:
            self._tables[setup.row].clear()
            self._last_tokens.pop(setup.row, None)
        changes = zip(
            unpack_ints(plan.changed_rows),
            unpack_ints(plan.changed_starts),
            unpack_ints(plan.changed_counts),
            strict=True,
        )
        for row, start, count in changes:
            for place in range(start, start + count):
                self._tables[Row(row)][place] = next(blocks)

    def _slot(self, row: Row, position: int) -> int:
        block = self._tables[row][position // self._block_size]
        return block * self._block_size + position % self._block_size


class InlineWorker(Actor[LaunchStep | CollectStep]):
    """A worker in a task instead of a thread, for virtual time: each step takes `step_s` of the loop's clock."""

    name: ClassVar[str] = "worker"
    capacity: ClassVar[int] = 16
    step_s: float = 0.0

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        runner.start()
        self._runner = runner
        self._pending: deque[tuple[PendingStep, float]] = deque()

    async def handle(self, message: LaunchStep | CollectStep) -> object:
        if isinstance(message, LaunchStep):
            last = self._pending[-1][1] if self._pending else anyio.current_time()
            self._pending.append((self._runner.launch(message.plan), last + self.step_s))
            return None
        pending, done_at = self._pending.popleft()
        await anyio.sleep_until(done_at)
        return pending.result()


class FakeTokenizer:
    """A tokenizer with megatron's interface: one token a character of a 97-letter alphabet."""

    bos = None
    eod = VOCAB_SIZE - 1
    vocab_size = VOCAB_SIZE

    def tokenize(self, text: str) -> list[int]:
        return [(ord(letter) - 32) % VOCAB_SIZE for letter in text]

    def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(32 + token) for token in tokens if not (skip_special_tokens and token == self.eod))
