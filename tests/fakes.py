"""Fakes for the engine's seams: a runner that is a tiny model, a worker without a thread, a tokenizer."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

import anyio

from megallm.core_async.kit.actor import Actor
from megallm.core_async.messages import (
    CollectStep,
    Floats,
    FollowStep,
    Ints,
    LaunchStep,
    ReleaseCache,
    RestoreCache,
    Row,
    RowSetup,
    StepPlan,
    StepResult,
    TopLogProbs,
    WorkerMessage,
    pack_floats,
    pack_ints,
    unpack_ints,
)
from megallm.core_async.protocols import PendingStep, Runner

VOCAB_SIZE = 97


def next_token(tokens: Sequence[int], masked: Sequence[int] = ()) -> int:
    """Gives the fake model's greedy choice after `tokens`: it depends on all of them and on their order."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    choices = [token for token in range(VOCAB_SIZE) if token not in masked] if masked else range(VOCAB_SIZE)
    return choices[state % len(choices)]


def continuation(
    prompt: Sequence[int], num_tokens: int, stop_ids: Sequence[int] = (), min_tokens: int = 0
) -> list[int]:
    """Gives what the fake model generates after a prompt, the id that ends it included."""
    tokens = list(prompt)
    for count in range(num_tokens):
        tokens.append(next_token(tokens, stop_ids if count < min_tokens else ()))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def log_prob(tokens: Sequence[int], token: int) -> float:
    """Gives the fake model's log-probability of `token` after `tokens`; a float32 holds it exactly."""
    return -((sum(tokens) * 7 + len(tokens) * 3 + token * 5) % 64) / 8


def likeliest(tokens: Sequence[int], num_top: int) -> list[tuple[int, float]]:
    """Gives the fake model's likeliest tokens after `tokens` and their log-probabilities."""
    order = sorted(range(VOCAB_SIZE), key=lambda token: (-log_prob(tokens, token), token))
    return [(token, log_prob(tokens, token)) for token in order[:num_top]]


def table_of(contexts: Sequence[Sequence[int]], num_top: int) -> TopLogProbs | None:
    """Gives the likeliest tokens after each context, as a rank reports them."""
    if not num_top:
        return None
    pairs = [pair for context in contexts for pair in likeliest(context, num_top)]
    return TopLogProbs(num_top, pack_ints([token for token, _ in pairs]), pack_floats([p for _, p in pairs]))


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
        self._setups: dict[Row, RowSetup] = {}
        self.is_released = False
        self.kept: list[int] = []
        """Blocks whose contents outlived the last release."""
        self.plans: list[StepPlan] = []
        self.is_started = False
        self.is_closed = False
        self.before_launch: Callable[[StepPlan], None] = lambda plan: None
        """Runs before each step; raises to kill the forward pass."""
        self.choose: Callable[[Sequence[int], Sequence[int]], int] = next_token
        """Gives the next token after some, none of the masked ones; a test may put a script here."""
        self.runs_at_launch = True
        """See Runner; False makes the engine launch the next step before it waits for this one."""

    def start(self) -> None:
        self.is_started = True

    def close(self) -> None:
        self.is_closed = True

    def release_cache(self, kept: Ints) -> None:
        self.is_released = True
        self.kept = list(unpack_ints(kept))
        assert len(set(self.kept)) == len(self.kept), f"blocks {self.kept} are to be kept"
        blocks = set(self.kept)
        self._slots = [
            token if slot // self._block_size in blocks else None for slot, token in enumerate(self._slots)
        ]

    def restore_cache(self) -> None:
        self.is_released = False

    def launch(self, plan: StepPlan) -> PendingStep:
        self.before_launch(plan)
        assert not self.is_released, f"step {plan.step} came while the cache is released"
        self.plans.append(plan)
        self._apply_changes(plan)
        given, targets = iter(unpack_ints(plan.tokens)), iter(unpack_ints(plan.targets))
        sampled: list[tuple[list[int], int]] = []
        scored: list[tuple[list[int], int]] = []
        rows = [Row(row) for row in unpack_ints(plan.rows)]
        columns = zip(
            rows,
            unpack_ints(plan.starts),
            unpack_ints(plan.lengths),
            plan.samples,
            plan.scored or bytes(len(rows)),
            strict=True,
        )
        for index, (row, start, length, is_sampling, is_scored) in enumerate(columns):
            for position in range(start, start + length):
                token = self._last_tokens[row] if index < plan.num_decode else next(given)
                self._slots[self._slot(row, position)] = token
            context = self._read(row, start + length) if is_sampling or is_scored else []
            if is_sampling:
                setup = self._setups[row]
                masked = setup.masked_ids if len(context) < setup.masked_until else ()
                self._last_tokens[row] = self.choose(context, masked)
                sampled.append((context, self._last_tokens[row]))
            if is_scored:
                wanted = [(position, next(targets)) for position in range(start, start + length)]
                scored += [(context[: position + 1], target) for position, target in wanted if target != -1]
        assert next(given, None) is None, "the plan gives more tokens than its rows take"
        assert next(targets, None) is None, "the plan gives more targets than its rows take"
        return FakePending(self._result(plan, rows, sampled, scored))

    def _result(
        self,
        plan: StepPlan,
        rows: list[Row],
        sampled: list[tuple[list[int], int]],
        scored: list[tuple[list[int], int]],
    ) -> StepResult:
        """Gives the tokens, and log-probs for all of them once one row asks, as a rank does."""
        asking = [setup.sampling for row in rows if (setup := self._setups[row]).sampling.wants_log_probs]
        num_top = max((sampling.num_top for sampling in asking), default=0)
        return StepResult(
            plan.step,
            pack_ints([token for _, token in sampled]),
            log_probs=pack_floats([log_prob(*pair) for pair in sampled]) if asking else Floats(b""),
            top=table_of([context for context, _ in sampled], num_top),
            scores=pack_floats([log_prob(*pair) for pair in scored]),
            score_top=table_of([context for context, _ in scored], num_top),
        )

    def _apply_changes(self, plan: StepPlan) -> None:
        blocks = iter(unpack_ints(plan.blocks))
        for setup in plan.new_rows:
            self._tables[setup.row].clear()
            self._setups[setup.row] = setup
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

    def _read(self, row: Row, num_tokens: int) -> list[int]:
        """Gives the row's first tokens out of the cache."""
        context = [self._slots[self._slot(row, position)] for position in range(num_tokens)]
        assert None not in context, f"row {row} reads a slot that nobody wrote: {context}"
        return [token for token in context if token is not None]

    def _slot(self, row: Row, position: int) -> int:
        block = self._tables[row][position // self._block_size]
        return block * self._block_size + position % self._block_size


class InlineWorker(Actor[WorkerMessage]):
    """A worker in a task instead of a thread, for virtual time: a step takes `step_s` of the loop's clock."""

    name: ClassVar[str] = "worker"
    capacity: ClassVar[int] = 16
    step_s: float = 0.0

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        runner.start()
        self._runner = runner
        self._pending: deque[tuple[PendingStep, float]] = deque()

    async def handle(self, message: WorkerMessage) -> object:
        match message:
            case LaunchStep(plan):
                last = self._pending[-1][1] if self._pending else anyio.current_time()
                self._pending.append((self._runner.launch(plan), last + self.step_s))
                return None
            case CollectStep():
                pending, done_at = self._pending.popleft()
                await anyio.sleep_until(done_at)
                return pending.result()
            case FollowStep():
                raise AssertionError("this engine follows no other rank")
            case ReleaseCache(kept):
                return self._runner.release_cache(kept)
            case RestoreCache():
                return self._runner.restore_cache()


class FakeTokenizer:
    """A tokenizer with megatron's interface: one token a character of a 97-letter alphabet."""

    bos = None
    eod = VOCAB_SIZE - 1
    vocab_size = VOCAB_SIZE

    def tokenize(self, text: str) -> list[int]:
        return [(ord(letter) - 32) % VOCAB_SIZE for letter in text]

    def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(32 + token) for token in tokens if not (skip_special_tokens and token == self.eod))
