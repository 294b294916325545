"""One rank chooses tokens, another follows: both know the same of the rows afterwards."""

from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from megallm.core_async.device.queued_step import StepTensors
from megallm.core_async.device.rows import Rows
from megallm.core_async.device.sampler import Sampled
from megallm.core_async.device.step_inputs import StepInputs, inputs_of
from megallm.core_async.device.token_choice import TokenChoice
from megallm.core_async.matchers import Matchers
from megallm.core_async.messages import Row, RowSetup, Sampling, pack_ints
from megallm.core_async.tokenizers import TokenizerAdapter
from tests.byte_tokenizer import ByteTokenizer
from tests.device.plans import engine_config
from tests.device.test_grammar import made
from tests.device.test_step_inputs import plan_of, rows_with_tables

CPU = torch.device("cpu")
VOCAB = ByteTokenizer.vocab_size
KINDS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.0, presence_penalty=1.0, wants_log_probs=True),
    Sampling(temperature=0.0, grammar=made(regex="[ab]c")),
]


@dataclass
class Rank:
    """A rank's choice, its rows, and its next step's inputs."""

    choice: TokenChoice
    rows: Rows
    position: int = 0

    def inputs(self) -> StepInputs:
        """Gives the inputs of a step in which every row samples."""
        self.position += 1
        plan = plan_of([(row, self.position, 1, True) for row in range(len(KINDS))], num_decode=3, tokens=[])
        if self.position == 1:
            setups = [
                RowSetup(row=Row(row), sampling=kind, num_prompt=1, known=pack_ints([65]))
                for row, kind in enumerate(KINDS)
            ]
            plan = replace(plan, new_rows=setups)
            self.choice.set_up(setups)
        self.rows.apply(plan)
        return inputs_of(plan, self.rows, block_size=4, device=CPU, rope=None)


def new_rank() -> Rank:
    """Gives a rank that has run no step."""
    rows, matchers = rows_with_tables(), Matchers(TokenizerAdapter(ByteTokenizer()), VOCAB)
    return Rank(TokenChoice(rows, engine_config(vocab_size=VOCAB), matchers, device=CPU), rows)


def tokens_of(step: StepTensors) -> list[int]:
    """Gives what a step chose."""
    assert step.sampled is not None
    return step.sampled.tokens.tolist()


def logits_for(*best: str) -> Tensor:
    """Gives logits whose best token a row is that letter, by less than a penalty."""
    logits = torch.zeros(len(best), VOCAB)
    logits[torch.arange(len(best)), torch.tensor([ord(letter) for letter in best])] = 0.5
    return logits


def test_a_rank_that_follows_could_choose_the_next_tokens() -> None:
    """What was counted and what a grammar has seen are the same on both: so the stages agree on faults."""
    choosing, following = new_rank(), new_rank()
    chosen = choosing.choice.choose(logits_for("x", "y", "b"), choosing.inputs())
    assert tokens_of(chosen) == [ord("x"), ord("y"), ord("b")]
    assert chosen.log_probs is not None
    assert chosen.sampled is not None
    assert following.choice.follow(chosen.sampled, following.inputs()) == []
    assert following.rows.last_tokens.equal(choosing.rows.last_tokens)
    for rank in (choosing, following):
        inputs = rank.inputs()
        assert rank.choice.has_rules(inputs.host_sampled_rows)
        step = rank.choice.choose(logits_for("x", "y", "b"), inputs)
        assert tokens_of(step) == [ord("x"), 0, ord("c")], "a second y is penalised, and c is all that fits"


def test_a_grammars_fault_shows_on_the_rank_that_follows() -> None:
    """It leads, and ends the request."""
    rank = new_rank()
    wrong = Sampled(tokens=torch.tensor([1, 2, ord("z")]), is_finite=torch.ones(3, dtype=torch.bool))
    assert rank.choice.follow(wrong, rank.inputs()) == []
    ((place, why),) = rank.choice.follow(wrong, rank.inputs())
    assert place == 2
    assert "z" in why
