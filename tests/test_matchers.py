"""Grammars are compiled within bounds, once, for whatever tokenizer there is."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from megallm.core_async import matchers as matchers_module
from megallm.core_async.grammar_bounds import MAX_BYTES
from megallm.core_async.matchers import Matchers, fault_of
from megallm.core_async.structured import grammar_of
from megallm.core_async.tokenizers import TokenizerAdapter
from tests.byte_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

VOCAB = 300


@pytest.fixture
def matchers() -> Matchers:
    """Gives matchers for the byte tokenizer, in a model with a few ids more."""
    return Matchers(TokenizerAdapter(ByteTokenizer()), VOCAB)


def made(**fields: object) -> str:
    """Gives the grammar of some fields."""
    return grammar_of(SimpleNamespace(**fields))


def allowed(matcher: "LLMatcher") -> set[int]:
    """Gives the ids that may come next."""
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return {token for token in range(mask.bit_length()) if mask >> token & 1}


def accepts(matchers: Matchers, grammar: str, text: str) -> bool:
    """Tells whether a text, a byte a token, is a whole output."""
    matcher = matchers.matcher(grammar)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def test_a_choice_is_exactly_its_strings(matchers: Matchers) -> None:
    """Each character stands for itself, whatever it means to an expression or a grammar."""
    choices = ["a", "ab", "", "a.c", "(x|y)*", "\\d", "/", "é\x7f\r\n\t\x00", "<|end|>", '"', "#x", "😀"]
    grammar = made(choice=choices)
    for choice in choices:
        assert accepts(matchers, grammar, choice), choice
    for other in ("abc", "aXc", "x", "1", "\\", "b", "<|"):
        assert not accepts(matchers, grammar, other), other


def test_an_expression_matches_the_whole_output(matchers: Matchers) -> None:
    """As re.fullmatch, so that nothing comes before or behind."""
    grammar = made(regex=r"\d{2}/[a-c]+|/")
    assert accepts(matchers, grammar, "12/abc")
    assert accepts(matchers, grammar, "/")
    assert not accepts(matchers, grammar, "12/abcd")
    assert not accepts(matchers, grammar, "x12/abc")


def test_a_special_token_is_no_text(matchers: Matchers) -> None:
    """Inside a string its spelling would be allowed, and end the request in the middle of the JSON."""
    matcher = matchers.matcher(made(json_schema={"type": "string"}))
    matcher.consume_tokens(list(b'"<'))
    assert not allowed(matcher) & {256, 257}
    assert ord("|") in allowed(matcher)


def test_the_spelling_of_a_special_token_is_text_where_it_is_asked_for(matchers: Matchers) -> None:
    """The tokenizer writes it as the special token, which is not what the grammar says."""
    matcher = matchers.matcher(made(choice=["<|end|>"]))
    for byte in b"<|end|>":
        assert allowed(matcher) == {byte}
        assert matcher.consume_token(byte)
    assert allowed(matcher) == {ByteTokenizer.eod}


def test_the_model_chooses_the_tokens_of_a_text_without_a_choice(matchers: Matchers) -> None:
    """Nothing is forced, so llguidance never runs ahead, and never has to ask the tokenizer."""
    matcher = matchers.matcher(made(choice=["abctrue"]))
    assert {matchers.tokenizer.decode_str([token]) for token in allowed(matcher)} == {"a", "ab", "abc"}


def test_a_grammar_without_an_end_compiles(matchers: Matchers) -> None:
    """Running ahead through it, llguidance would never come back."""
    matcher = matchers.matcher(made(grammar='start: start "a" | /b*/ start "c"'))
    assert allowed(matcher) == {ord("b")}


def test_ids_that_stand_for_nothing_are_never_allowed(matchers: Matchers) -> None:
    """A model's vocabulary is padded; those logits are arbitrary numbers."""
    ids = allowed(matchers.matcher(made(regex=r"(?s:.*)")))
    assert max(ids) < ByteTokenizer.vocab_size
    assert ByteTokenizer.eod in ids, "the empty output matches"
    assert ByteTokenizer.bos not in ids


def test_matchers_of_one_grammar_do_not_follow_each_other(matchers: Matchers) -> None:
    """They are copies of what was compiled once."""
    grammar = made(choice=["ab", "ba"])
    first, second = matchers.matcher(grammar), matchers.matcher(grammar)
    assert first.consume_token(ord("a"))
    assert allowed(first) == {ord("b")}
    assert ord("a") in allowed(second)


def test_a_grammar_is_compiled_once(matchers: Matchers) -> None:
    """Checking a request must not be followed by the same work in the step that starts it."""
    grammar = made(regex="a+")
    before = matchers.matcher(grammar)
    started: list[str] = []

    def note(*_: object) -> None:
        started.append(threading.current_thread().name)

    threading.settrace(note)
    try:
        matchers.check(grammar)
        assert not started
        matchers.forget(grammar)
        matchers.check(grammar)
    finally:
        threading.settrace(None)  # type: ignore[arg-type] - typeshed forgets that None takes it off
    assert "megallm-grammar" in started
    assert not before.is_error(), "what is in use stays as it is"


def test_the_oldest_grammar_makes_room(matchers: Matchers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may hold 40 MB, and a stranger can send as many as there are numbers."""
    monkeypatch.setattr(matchers_module, "MAX_KEPT", 2)
    for choice in ("a", "b", "c"):
        matchers.check(made(choice=[choice]))
    assert len(matchers._kept) == 2  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def chain(line: str, last: str, end: str) -> str:
    """Gives rules that each refer to the next, as many as a grammar may have."""
    size = int(last[1:])
    start = f"start: {last[0]}0"
    return "\n".join([start, *(line.format(number, number + 1) for number in range(size)), f"{last}: {end}"])


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"regex": "("}, "regex: unclosed group"),
        ({"regex": r"(a)\1"}, "regex: backreferences are not supported"),
        ({"regex": r"a\b"}, "regex: .*lookarounds not supported"),
        ({"regex": r"[^\s\S]"}, "regex: no token of the vocabulary can come next"),
        ({"json_schema": {"type": "strin"}}, "json_schema: Invalid type: strin"),
        ({"json_schema": {"not": {}}}, "json_schema: Unimplemented keys"),
        ({"json_schema": {"enum": []}}, "json_schema: Unsatisfiable schema"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema: Pointer '/nowhere' does not exist"),
        ({"json_schema": {"$ref": "#"}}, "json_schema: no token of the vocabulary can come next"),
        ({"grammar": "start: missing"}, "grammar: unknown name"),
        ({"grammar": chain("r{0}: r{1} r{1}?", "r498", '"a"')}, "grammar: Parser Error: Current row has"),
    ],
)
def test_what_can_not_be_compiled_is_refused_with_field_and_fault(
    matchers: Matchers, fields: dict[str, Any], fault: str
) -> None:
    """Before it runs: in the middle of an output there is no good answer any more."""
    with pytest.raises(ValueError, match=fault):
        matchers.check(made(**fields))


def filled(start: str, part: str, end: str) -> str:
    """Gives a schema's text of nearly the largest size."""
    count = (MAX_BYTES - len(start) - len(end)) // (len(part) + 6)
    return start + ",".join(part.format(n, n + 1) for n in range(count)) + end


HOSTILE: dict[str, Callable[[], dict[str, object]]] = {
    "nested bounds": lambda: {"regex": "((a{1,100}){1,100}){1,100}"},
    "a huge bound": lambda: {"regex": "a{1000000000}"},
    "backtracking bait": lambda: {"regex": "(a*)*b" * 200},
    "states that double": lambda: {"regex": "(a|b)*a(a|b){200}"},
    "many optional letters": lambda: {"regex": "a?" * 2000 + "a" * 2000},
    "unicode classes": lambda: {"regex": r"(\w+\s?){1,1000}(\W+\S){1,1000}"},
    "eight patterns at once": lambda: {
        "json_schema": {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefgh"]}
    },
    "a large enum": lambda: {"json_schema": filled('{"enum":[', '"value {}"', "]}")},
    "optional properties": lambda: {"json_schema": {"properties": {f"p{n}": {} for n in range(1000)}}},
    "many large objects": lambda: {
        "json_schema": {"anyOf": [{"properties": {f"p{n}-{m}": {} for m in range(99)}} for n in range(40)]}
    },
    "a chain of objects": lambda: {
        "json_schema": filled(
            '{"$ref":"#/d/0","d":{', '"{}":{{"properties":{{"a":{{"$ref":"#/d/{}"}}}}}}', "}}"
        )
    },
    "nested arrays": lambda: {
        "json_schema": {"items": {"items": {"type": "integer"}, "minItems": 1000}, "minItems": 1000}
    },
    "rules that may be empty": lambda: {"grammar": chain('r{}: (((r{} "b")*)?)+', "r498", '"a"')},
    "terminals in terminals": lambda: {"grammar": chain('R{}: (R{} "b")*', "R498", '"a"')},
    "rules that double": lambda: {"grammar": chain("r{0}: r{1} r{1}", "r60", '"a"')},
    "ambiguity": lambda: {"grammar": 'start: e\ne: e e | e "+" e | "a" | "b" e "b" |'},
    "json in rules": lambda: {"grammar": chain('r{}: %json {{"x": 1}} r{}', "r498", '"a"')},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_input_made_to_be_slow_ends_by_itself(matchers: Matchers, name: str) -> None:
    """An abandoned thread that goes on for minutes takes a core from the engine, and its stack the process.

    That an input is refused is as good as that it is compiled.
    """
    said = ""
    try:
        matchers.check(made(**HOSTILE[name]()))
    except ValueError as error:
        said = str(error)
    assert "was not compiled in" not in said
    assert len(said) < 400


def test_compiling_has_a_time_limit() -> None:
    """The caller waits no longer, whatever the thread is doing."""
    matchers = Matchers(TokenizerAdapter(ByteTokenizer()), VOCAB, time_limit_s=0.001)
    with pytest.raises(ValueError, match=r"grammar was not compiled in 0\.001 s"):
        matchers.check(made(**HOSTILE["rules that may be empty"]()))


def test_only_so_many_grammars_compile_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that were given up still run."""
    monkeypatch.setattr(matchers_module, "MAX_COMPILING", 0)
    matchers = Matchers(TokenizerAdapter(ByteTokenizer()), VOCAB, time_limit_s=0.001)
    with pytest.raises(ValueError, match="other grammars have been compiling"):
        matchers.check(made(choice=["a"]))


def test_the_next_thread_has_the_stack_it_would_have_had(matchers: Matchers) -> None:
    """The size is a setting of the whole process."""
    matchers.check(made(choice=["a"]))
    assert threading.stack_size() == 0


def test_several_threads_may_check_and_follow_the_same_grammar(matchers: Matchers) -> None:
    """Callers check while the rank runs."""
    grammar = made(json_schema={"type": "object", "properties": {"a": {"type": "string"}}})
    faults: list[str] = []

    def follow() -> None:
        for _ in range(20):
            matcher = matchers.matcher(grammar)
            for token in b'{"a":"xyz"}':
                matcher.compute_bitmask()
                matcher.consume_token(token)
            faults.append(fault_of(matcher))

    threads = [threading.Thread(target=follow) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == [""] * 80
