"""Compiled grammars of one tokenizer, shared by those who check a request and by the rank that runs it.

Knows llguidance and what it needs of a tokenizer; knows no request, no row and no tensor. llguidance is
imported when the first grammar comes.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Protocol, cast, runtime_checkable

from megallm.core_async.structured import field_of, require_llguidance, shortened
from megallm.core_async.tokenizers import TokenizerAdapter

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

COMPILE_LIMIT_S: Final = 5.0
"""What gets past `structured.py` was seen to take half a second at most, real schemas 1 to 50 ms."""
MAX_COMPILING: Final = 4
"""Threads that compile at the same time, those given up included: the rest of the machine stays free."""
MAX_KEPT: Final = 16
"""Compiled grammars kept for the next request that asks for them; one made to be large holds 55 MB."""
STACK_BYTES: Final = 256 * 2**20
"""Address space for a compiling thread's stack, touched as it is used. llguidance calls itself once for each
step of a chain of references: 64 KB of them overflow a usual stack of 8 MiB, which ends the process, and fit
64 MiB."""
NUM_PROBED: Final = 4
"""Tokens tried after compiling: some grammars compile and exceed a limit with the first token."""

_stack_size_lock: Final = threading.Lock()
"""The size of the next thread's stack is a setting of the whole process."""


@runtime_checkable
class TokenBytes(Protocol):
    """A tokenizer that says which bytes each of its tokens stands for."""

    @property
    def vocab_size(self) -> int: ...

    def token_bytes(self, token_id: int) -> bytes:
        """Gives the bytes of a token, part of a text's UTF-8."""
        ...


class Matchers:
    """Makes matchers: what follows one output and tells which tokens may come next.

    Any thread may call it. The matchers of one grammar share what llguidance learns of it, and where one
    of them exceeds a limit there, the others fail too: `forget` the grammar then and `compile` anew.
    """

    def __init__(
        self, tokenizer: TokenizerAdapter, vocab_size: int, *, time_limit_s: float = COMPILE_LIMIT_S
    ) -> None:
        """`vocab_size` is the model's: ids past the tokenizer's are never allowed."""
        self.vocab_size: Final = vocab_size
        self._adapter = tokenizer
        self._time_limit_s = time_limit_s
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.BoundedSemaphore(MAX_COMPILING)

    def check(self, grammar: str) -> None:
        """Compiles a grammar, unless that was done before. Waits: up to the time limit, and not in a loop.

        Raises: ValueError naming the field and what llguidance says of it, or the time it had.
        """
        self.matcher(grammar)

    def matcher(self, grammar: str) -> "LLMatcher":
        """Gives a matcher at the start of an output; compiles, and waits, for a grammar not seen of late.

        Raises: as `check`.
        """
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
                return kept.deep_copy()
        compiled = self.compile(grammar)
        with self._lock:
            self._kept[grammar] = compiled
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return compiled.deep_copy()

    def forget(self, grammar: str) -> None:
        """Compiles a grammar anew for its next request."""
        with self._lock:
            self._kept.pop(grammar, None)

    def compile(self, grammar: str) -> "LLMatcher":
        """Gives a matcher that shares nothing with any other. Waits, up to the time limit.

        Raises: as `check`.
        """
        tokenizer = self.tokenizer
        field = field_of(grammar)
        if not self._compiling.acquire(timeout=self._time_limit_s):
            raise ValueError(
                f"{field}: {MAX_COMPILING} other grammars have been compiling for {self._time_limit_s:g} s;"
                " try again later"
            )
        outcome: SimpleQueue[LLMatcher | BaseException] = SimpleQueue()

        def run() -> None:
            try:
                outcome.put(_compiled(tokenizer, grammar))
            except BaseException as error:  # noqa: BLE001 - a Rust panic is none of the others; raised below
                outcome.put(error)
            finally:
                self._compiling.release()

        _start_with_deep_stack(run)
        try:
            result = outcome.get(timeout=self._time_limit_s)
        except Empty:
            raise ValueError(
                f"{field} was not compiled in {self._time_limit_s:g} s, which is the limit; make it simpler"
            ) from None
        match result:
            case ValueError():
                raise ValueError(f"{field}: {result}") from result
            case BaseException():
                raise result
            case matcher:
                return matcher

    @property
    def tokenizer(self) -> "LLTokenizer":
        """The vocabulary as llguidance sees it; made on first use, half a second for 50,000 tokens.

        Raises: ValueError where the tokenizer does not tell its tokens' bytes or its end of sequence.
        """
        with self._lock:
            if self._tokenizer is None:
                require_llguidance()
                self._tokenizer = _tokenizer_of(self._adapter, self.vocab_size)
            return self._tokenizer


def fault_of(matcher: "LLMatcher") -> str:
    """Gives why a matcher can't go on; "" where it can."""
    if not matcher.is_error():
        return ""
    said = shortened(matcher.get_error())
    return "no token of the vocabulary can come next" if said == "NoExtensionBias" else said


def _start_with_deep_stack(run: Callable[[], None]) -> None:
    """Starts a thread that the process need not wait for when it ends."""
    with _stack_size_lock:
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="megallm-grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)


def _limits() -> "LLParserLimits":
    """Gives what one grammar may cost; times are those measured with inputs made to be slow."""
    from llguidance import LLParserLimits  # noqa: PLC0415 - an extra

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # compiling: half a second
        step_lexer_fuel=200_000,  # a mask: 20 ms
        step_max_items=10_000,  # a mask: 60 ms
        max_items_in_row=1_000,  # taking a token: 60 ms. An object may have 250 optional properties
        max_lexer_states=50_000,  # 55 MB
        max_grammar_size=100_000,
        verbose_errors=False,  # an error would quote the whole grammar
    )


def _compiled(tokenizer: "LLTokenizer", grammar: str) -> "LLMatcher":
    """Compiles, and follows the first allowed tokens for a few steps.

    Raises: ValueError with what llguidance says.
    """
    from llguidance import LLMatcher  # noqa: PLC0415 - an extra

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
    _expect_no_error(matcher)
    probe = matcher.deep_copy()
    for _ in range(NUM_PROBED):
        mask = probe.compute_bitmask()
        _expect_no_error(probe)
        first = _first_token(mask)
        if first in tokenizer.eos_tokens:
            break
        probe.consume_token(first)
        _expect_no_error(probe)
    return matcher


def _expect_no_error(matcher: "LLMatcher") -> None:
    fault = fault_of(matcher)
    if fault:
        raise ValueError(fault)


def _first_token(mask: bytes) -> int:
    """Gives the lowest id of a mask of one bit a token."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1


def _tokenizer_of(adapter: TokenizerAdapter, vocab_size: int) -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415 - an extra

    wrapped: object = adapter.wrapped
    name = type(wrapped).__name__
    if adapter.eod is None:
        raise ValueError(
            f"structured output needs an id that ends a text, and the tokenizer, a {name}, names none"
        )
    if isinstance(wrapped, TokenBytes):
        return LLTokenizer(TokenizerWrapper(_Vocabulary(adapter, wrapped, vocab_size)))
    backend = _fast_backend(wrapped)
    if backend is None:
        raise ValueError(
            f"structured output needs the bytes of every token, and the tokenizer, a {name}, has no"
            " token_bytes(id) and is no fast Hugging Face tokenizer"
        )
    try:
        return LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=[adapter.eod])
    except ValueError as error:
        raise ValueError(f"structured output can't use the tokenizer, a {name}: {error}") from error


def _fast_backend(tokenizer: object) -> Any | None:  # Any: a tokenizers.Tokenizer, which has no types
    """Finds the `tokenizers` object of a fast Hugging Face tokenizer, given itself or wrapped by megatron."""
    inner: object = getattr(tokenizer, "_tokenizer", None)
    for candidate in (tokenizer, inner, getattr(inner, "tokenizer", None)):
        backend: object = getattr(candidate, "backend_tokenizer", None)
        if backend is not None:
            return backend
    return None


class _Vocabulary:
    """A tokenizer as llguidance's TokenizerWrapper takes it: the bytes of all tokens, and text to ids."""

    def __init__(self, adapter: TokenizerAdapter, spelled: TokenBytes, vocab_size: int) -> None:
        self._adapter = adapter
        num_spelled = min(spelled.vocab_size, vocab_size)
        self.eos_token_id = adapter.eod
        self.bos_token_id = adapter.bos
        self.tokens = [spelled.token_bytes(token_id) for token_id in range(num_spelled)]
        self.special_token_ids = sorted(self._special_ids())
        self.tokens += [b""] * (vocab_size - num_spelled)  # never allowed

    def __call__(self, text: bytes) -> list[int]:
        """Gives the ids of a text; grammars that force no tokens never ask."""
        return self._adapter.tokenize(text.decode())

    def _special_ids(self) -> set[int]:
        """Gives the ids that are no text, whatever they are spelled like: the output does not show them."""
        detokenize = self._adapter.detokenize
        before = self._adapter.tokenize("a")
        text = detokenize(before)
        invisible = {
            token_id
            for token_id, spelling in enumerate(self.tokens)
            if spelling and not detokenize([token_id]) and detokenize([*before, token_id]) == text
        }
        named = {self._adapter.eod, self._adapter.bos} - {None}
        return invisible | cast("set[int]", named)  # cast: None was taken out
