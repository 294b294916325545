"""Whatever the logits say, a row's output is what its grammar allows, and its neighbours are their own."""

import json
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megallm.core_async.device.grammar import GrammarRows
from megallm.core_async.matchers import Matchers
from megallm.core_async.structured import grammar_of
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.models.load import find_file, open_checkpoint
from tests.byte_tokenizer import ByteTokenizer
from tests.json_check import faults

CPU = torch.device("cpu")
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-\\d{1,3}$"},
        "tags": {"type": "array", "items": {"enum": ["rot", "grün", "世界"]}, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"zip": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 5}]}},
            "required": ["zip"],
            "additionalProperties": False,
        },
        "is_new": {"type": "boolean"},
    },
    "required": ["name", "age", "code", "home"],
    "additionalProperties": False,
}


class Vocabulary:
    """The demo model's tokens, and matchers for them."""

    def __init__(self) -> None:
        self.tokenizer = open_checkpoint(find_file("smollm2-135m")).tokenizer()
        self.eod = self.tokenizer.eod or 0
        self.size = self.tokenizer.vocab_size
        self.matchers = Matchers(TokenizerAdapter(self.tokenizer), self.size)

    def rows(self) -> GrammarRows:
        """Gives the state of a batch in which no row has a grammar."""
        return GrammarRows(self.matchers, device=CPU)

    def text(self, tokens: Sequence[int]) -> str:
        """Gives the text of an output, which must be UTF-8 as it stands."""
        return b"".join(self.tokenizer.token_bytes(token) for token in tokens).decode()

    def ids(self, text: str) -> list[int]:
        """Gives a text's ids."""
        return self.tokenizer.tokenize(text)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Gives the demo model's vocabulary: building it takes a second."""
    return Vocabulary()


def made(**fields: object) -> str:
    """Gives the grammar of some fields."""
    return grammar_of(SimpleNamespace(**fields))


def column(*numbers: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """Gives a column of a plan."""
    return np.array(numbers, dtype=np.int32)


def allowed(rows: GrammarRows, row: int, size: int) -> set[int]:
    """Gives the ids that a row's mask leaves."""
    logits = torch.zeros(1, size)
    assert not rows.mask(logits, column(row))
    return set(logits[0].isfinite().nonzero()[:, 0].tolist())


def walk(rows: GrammarRows, numbers: Sequence[int], vocabulary: Vocabulary, seed: int) -> list[list[int]]:
    """Samples rows until each has ended: any allowed token is as likely as any other."""
    generator = torch.Generator().manual_seed(seed)
    outputs: list[list[int]] = [[] for _ in numbers]
    active = list(range(len(numbers)))
    for _ in range(300):
        logits = torch.randn(len(active), vocabulary.size, generator=generator)
        some = column(*(numbers[place] for place in active))
        assert rows.mask(logits, some) == {}
        tokens = logits.argmax(-1)
        rows.advance(some, tokens.numpy())
        for place, token in zip(active, tokens.tolist(), strict=True):
            outputs[place].append(token)
        active = [place for place in active if outputs[place][-1] != vocabulary.eod]
        if not active:
            return [output[:-1] for output in outputs]
    raise AssertionError(
        f"rows {active} are not done: {[vocabulary.text(outputs[place]) for place in active]}"
    )


def test_json_parses_and_validates(vocabulary: Vocabulary) -> None:
    """What structured output is for."""
    rows = vocabulary.rows()
    for row in range(24):
        rows.begin(row, made(json_schema=PERSON))
    texts = [vocabulary.text(output) for output in walk(rows, range(24), vocabulary, seed=1)]
    for text in texts:
        assert faults(json.loads(text), PERSON) == []
    assert len(set(texts)) == 24
    assert not all(text.isascii() for text in texts), "characters of several bytes are made of several tokens"


def test_every_kind_of_grammar_holds_beside_the_others(vocabulary: Vocabulary) -> None:
    """Rows of one batch have different ones."""
    choices = ["ja", "ja, aber", "nein", "<|im_end|>", "½ 世界 🎈", "\x7f\n"]
    pattern = r"([A-Za-z]{2,8}, ){1,3}(19|20)\d{2}( \(é+\))?"
    calls = 'start: "f(" _list ")"\n_list: item ("," item)*\nitem: /[a-z]{1,5}/ | "(" _list ")"'
    gbnf = 'root ::= "<" [a-c]+ ">" ( "yes" | "no" )'
    rows = vocabulary.rows()
    for row in range(0, 20, 4):
        rows.begin(row, made(choice=choices))
        rows.begin(row + 1, made(regex=pattern))
        rows.begin(row + 2, made(grammar=calls))
        rows.begin(row + 3, made(grammar=gbnf))
    outputs = walk(rows, range(20), vocabulary, seed=2)
    for row, text in enumerate(map(vocabulary.text, outputs)):
        match row % 4:
            case 0:
                assert text in choices
            case 1:
                assert re.fullmatch(pattern, text), text
            case 2:
                assert re.fullmatch(r"f\([a-z(),]+\)", text), text
                assert text.count("(") == text.count(")")
            case _:
                assert re.fullmatch(r"<[a-c]+>(yes|no)", text), text


def test_no_special_token_is_part_of_an_output(vocabulary: Vocabulary) -> None:
    """In a string their spelling is text; the token is not, and would end the request there."""
    rows = vocabulary.rows()
    rows.begin(0, made(json_schema={"type": "string"}), vocabulary.ids('"'))
    ids = allowed(rows, 0, vocabulary.size)
    assert len(ids) > 30_000
    assert not [
        token for token in ids if not vocabulary.tokenizer.detokenize([token], skip_special_tokens=True)
    ]


def test_a_complete_output_leaves_the_end_alone(vocabulary: Vocabulary) -> None:
    """Also after the end, which the plan in flight still computes."""
    rows = vocabulary.rows()
    rows.begin(0, made(choice=["yes"]), vocabulary.ids("yes"))
    assert allowed(rows, 0, vocabulary.size) == {vocabulary.eod}
    rows.advance(column(0), column(vocabulary.eod))
    assert allowed(rows, 0, vocabulary.size) == {vocabulary.eod}
    rows.advance(column(0), column(vocabulary.eod))
    assert allowed(rows, 0, vocabulary.size) == {vocabulary.eod}


def test_a_request_has_its_own_ends(vocabulary: Vocabulary) -> None:
    """`termination_id` and `stop_token_ids` say what ends it, whatever the tokenizer has."""
    stop, letter = 0, vocabulary.ids("b")[0]
    rows = vocabulary.rows()
    rows.begin(0, made(regex="a+"), end_ids=[stop, letter])
    assert stop not in allowed(rows, 0, vocabulary.size)
    rows.advance(column(0), column(*vocabulary.ids("a")))
    ids = allowed(rows, 0, vocabulary.size)
    assert {stop, letter} < ids
    assert vocabulary.eod not in ids, "the request would not end there"
    rows.advance(column(0), column(letter))
    assert allowed(rows, 0, vocabulary.size) == {stop, letter}


def test_an_output_does_not_end_before_its_least_length_unless_it_must(vocabulary: Vocabulary) -> None:
    """`min_tokens` yields to the grammar: with neither there would be nothing to sample."""
    (letter,) = vocabulary.ids("a")
    rows = vocabulary.rows()
    rows.begin(0, made(regex="a+"), [letter], min_new_tokens=2)
    assert vocabulary.eod not in allowed(rows, 0, vocabulary.size)
    rows.advance(column(0), column(letter))
    assert vocabulary.eod in allowed(rows, 0, vocabulary.size)
    rows.begin(1, made(choice=["a"]), [letter], min_new_tokens=5)
    assert allowed(rows, 1, vocabulary.size) == {vocabulary.eod}


def test_a_preempted_row_goes_on_where_it_was(vocabulary: Vocabulary) -> None:
    """Its tokens are computed again, not sampled, so the grammar has to be told of them."""
    grammar = made(json_schema=PERSON)
    rows = vocabulary.rows()
    rows.begin(0, grammar)
    (output,) = walk(rows, [0], vocabulary, seed=3)
    rows.begin(0, grammar)
    for cut, token in enumerate(output):
        rows.begin(1, grammar, output[:cut])
        both = torch.zeros(2, vocabulary.size)
        rows.mask(both, column(0, 1))
        assert both[0].equal(both[1]), cut
        rows.advance(column(0), column(token))
    rows.begin(1, grammar, [*output, vocabulary.eod])
    assert allowed(rows, 1, vocabulary.size) == {vocabulary.eod}


def test_rows_without_a_grammar_keep_their_logits(vocabulary: Vocabulary) -> None:
    """Most of a batch has none."""
    rows = vocabulary.rows()
    assert not rows.holds(column(2, 7))
    rows.begin(7, made(choice=["a"]))
    rows.begin(2, made(choice=["b"]))
    assert rows.holds(column(5, 2))
    assert not rows.holds(column(5, 0))
    logits = torch.randn(4, vocabulary.size, generator=torch.Generator().manual_seed(4))
    before = logits.clone()
    assert rows.mask(logits, column(5, 2, 7, 0)) == {}
    assert logits[[0, 3]].equal(before[[0, 3]])
    for place, letter in ((1, "b"), (2, "a")):
        (token,) = vocabulary.ids(letter)
        assert logits[place, token] == before[place, token]
        assert logits[place].isfinite().sum() == 1
    rows.end(2)
    rows.end(3)
    assert rows.mask(logits.copy_(before), column(5, 2)) == {}
    assert logits.equal(before), "row 2 was let go"
    assert not rows.holds(column(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_logits_are_masked_in_place(vocabulary: Vocabulary, dtype: torch.dtype) -> None:
    """A model's come in its own precision, and with ids behind the vocabulary that are cut off."""
    padded = torch.ones(2, vocabulary.size + 100, dtype=dtype)
    padded[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    rows = vocabulary.rows()
    for row in (0, 1):
        rows.begin(row, made(choice=["a"]))
    rows.mask(padded[:, : vocabulary.size], column(0, 1))
    (token,) = vocabulary.ids("a")
    assert padded[1].eq(1).nonzero()[:, 0].tolist() == [token, *range(vocabulary.size, vocabulary.size + 100)]
    assert padded[0, 0].isnan(), "so that it is found"
    assert padded[0, 1:3].tolist() == [-torch.inf, -torch.inf]


def test_ids_behind_the_tokenizers_are_never_allowed() -> None:
    """A model's vocabulary may be larger, and what its last logits say is noise."""
    size = ByteTokenizer.vocab_size + 64
    rows = GrammarRows(Matchers(TokenizerAdapter(ByteTokenizer()), size), device=CPU)
    rows.begin(0, made(regex="(?s:.*)"))
    ids = allowed(rows, 0, size)
    assert len(ids) > 150
    assert max(ids) < ByteTokenizer.vocab_size


def masks(rows: GrammarRows, numbers: Sequence[int], size: int) -> tuple[Tensor, dict[int, str]]:
    """Gives some rows' masked zeros, and the faults."""
    logits = torch.zeros(len(numbers), size)
    return logits, rows.mask(logits, column(*numbers))


def test_a_row_that_can_not_go_on_says_so_and_leaves_the_others_alone(vocabulary: Vocabulary) -> None:
    """One request's trouble is that request's."""
    alone, rows = vocabulary.rows(), vocabulary.rows()
    alone.begin(0, made(regex="[a-z]+"))
    expected, _ = masks(alone, [0], vocabulary.size)
    for row in range(3):
        rows.begin(row, made(regex="[a-z]+"))
    rows.begin(1, made(regex="[0-9]+"), vocabulary.ids("x"))
    for _ in range(2):
        logits, found = masks(rows, [0, 1, 2], vocabulary.size)
        assert list(found) == [1], "until it is let go"
        assert rows.faults(column(0, 1, 2)) == found, "also where there are no logits"
        assert "x" in found[1]
        assert logits[0].equal(expected[0])
        assert logits[2].equal(expected[0])
        assert logits[1].eq(0).all(), "a row with nothing left would look like a broken model"
    rows.advance(column(1), column(5))
    rows.begin(1, made(regex="[a-z]+"))
    logits, found = masks(rows, [1], vocabulary.size)
    assert found == {}
    assert logits.equal(expected)


def test_a_grammar_that_can_not_be_compiled_is_a_fault_of_its_row(vocabulary: Vocabulary) -> None:
    """Requests are checked before; another rank's process may still run out of time."""
    rows = vocabulary.rows()
    rows.begin(0, made(regex="("))
    rows.begin(1, made(regex="a"))
    logits, found = masks(rows, [0, 1], vocabulary.size)
    assert found == {0: "regex: unclosed group"}
    assert logits[1].isfinite().sum() < 20
    rows.advance(column(0, 1), column(5, vocabulary.ids("a")[0]))


def test_a_row_that_exceeds_a_limit_does_not_take_along_rows_of_the_same_grammar(
    vocabulary: Vocabulary,
) -> None:
    """They share a lexer, and once it has failed it fails for all of them."""
    grammar = made(regex=r":\d*|(\w+\s?){1,1000}(\W+\S){1,1000}")
    rows = vocabulary.rows()
    for row in range(3):
        rows.begin(row, grammar)
    colon, digit = vocabulary.ids(":7")
    generator = torch.Generator().manual_seed(5)
    rows.advance(column(0, 2), column(colon, colon))
    found: dict[int, str] = {}
    while not found:
        logits = torch.randn(3, vocabulary.size, generator=generator)
        found = rows.mask(logits, column(0, 1, 2))
        rows.advance(column(0, 1, 2), column(digit, int(logits[1].argmax()), digit))
    assert found == {1: "lexer error: too many expressions constructed"}
    for row in (0, 2):
        ids = allowed(rows, row, vocabulary.size)
        assert {digit, vocabulary.eod} < ids
        assert not ids.intersection([colon, *vocabulary.ids("a b")])
    rows.begin(1, grammar)
    assert colon in allowed(rows, 1, vocabulary.size), "the next request starts with a sound one"
