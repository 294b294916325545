"""A tokenizer as text that travels to another process, and the tokenizer that is made of it there.

What can't be described this way, or comes out otherwise than it went in, is refused with the reason:
pickle would carry anything, code included.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, cast, overload

from msgspec import Struct
from tokenizers import Tokenizer

from megallm.core_async.errors import InvalidRequestError, MegaLLMError
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.models.base_tokenizer import ModelTokenizer, SpecialIds
from megallm.models.chat_template import render
from megallm.models.hf_tokenizer import build_tokenizer
from megallm.models.tokenizer import BackendTokenizer, ByteLevelTokenizer, PieceTokenizer

PROBES: Final = (
    "Hello, world!",
    "  two blanks,\n\na line, \t a tab",
    "well , it 's fine . is n't it ?",  # which Hugging Face may clean up
    "def f(x):\n    return x + 1_000",
    "naïve café — 東京 🙂 e\u0301",
    "don't  stop... <s></s><|endoftext|><|im_end|>",
)
"""Texts that both tokenizers must split alike."""


class UnportableTokenizerError(MegaLLMError):
    """The tokenizer can't be described as text; says why. Nobody's fault."""


class TokenizerSpec(Struct, frozen=True, kw_only=True):
    """What a tokenizer is made of."""

    kind: Literal["byte_level", "piece", "fast", "file"]
    """`fast` is Hugging Face's; `file` is made anew of the file at `path`."""
    backend: str = ""
    """JSON of the `tokenizers` library."""
    special_ids: SpecialIds = SpecialIds()
    chat_template: str | None = None
    path: str = ""
    special_tokens: dict[str, str] = {}
    """What chat templates of Hugging Face's call them."""
    vocab_size: int = 0


def describe(adapter: TokenizerAdapter) -> TokenizerSpec:
    """Gives what an equal tokenizer can be made of, in another process.

    Raises: UnportableTokenizerError.
    """
    spec = _spec_of(adapter.wrapped)
    copy = TokenizerAdapter(build(spec))
    named = (adapter.bos, adapter.end_ids), (copy.bos, copy.end_ids)
    if named[0] != named[1]:
        raise UnportableTokenizerError(f"its bos and its ends are {named[0]}, and {named[1]} in a copy of it")
    for text in PROBES:
        if not _agree(adapter, copy, text):
            raise UnportableTokenizerError(f"a copy of it treats {text!r} otherwise")
    return spec


def build(spec: TokenizerSpec) -> Any:  # Any: as TokenizerAdapter takes it
    """Makes the tokenizer.

    Raises: ModelFileError where its file has gone.
    """
    if spec.kind == "file":
        return build_tokenizer(Path(spec.path))
    backend: Tokenizer = Tokenizer.from_str(spec.backend)
    if spec.kind == "fast":
        return FastTokenizer(backend, spec)
    kind = ByteLevelTokenizer if spec.kind == "byte_level" else PieceTokenizer
    return kind(backend, special_ids=spec.special_ids, chat_template=spec.chat_template, path=spec.path)


class FastTokenizer:
    """Hugging Face's interface over the `tokenizers` library, without transformers."""

    def __init__(self, backend: Tokenizer, spec: TokenizerSpec) -> None:
        self.backend_tokenizer: Final = backend
        self.chat_template: Final = spec.chat_template
        self.bos_token_id: Final = spec.special_ids.bos
        self.eos_token_id: Final = spec.special_ids.eos
        self.vocab_size: Final = spec.vocab_size
        self._special_tokens = spec.special_tokens

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Gives the ids of a text."""
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Gives the text of ids."""
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        *,
        tokenize: Literal[True] = True,
        **options: Any,
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        *,
        tokenize: Literal[False],
        **options: Any,
    ) -> str: ...
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],  # Any: what JSON can hold
        chat_template: str | None = None,
        *,
        tokenize: bool = True,
        **options: Any,  # Any: the template's own variables
    ) -> list[int] | str:
        """Gives a conversation as one prompt, in ids or in text; the template writes its special tokens.

        Raises: InvalidRequestError when there is no template, or the template refuses the messages.
        """
        template = chat_template or self.chat_template
        if template is None:
            raise InvalidRequestError("the tokenizer has no chat template; pass chat_template")
        text = render(template, conversation, **(self._special_tokens | options))
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _spec_of(tokenizer: object) -> TokenizerSpec:
    if isinstance(tokenizer, BackendTokenizer):
        ids = SpecialIds(
            bos=tokenizer.bos,
            eos=tokenizer.eod,
            pad=tokenizer.pad,
            unk=tokenizer.unk,
            stops=tuple(tokenizer.stop_ids),
        )
        return TokenizerSpec(
            kind="byte_level" if isinstance(tokenizer, ByteLevelTokenizer) else "piece",
            backend=tokenizer.to_json(),
            special_ids=ids,
            chat_template=tokenizer.chat_template,
            path=tokenizer.path,
        )
    if isinstance(tokenizer, ModelTokenizer):
        spec = TokenizerSpec(kind="file", path=tokenizer.path)
        if not Path(tokenizer.path).exists() or build(spec).chat_template != tokenizer.chat_template:
            raise UnportableTokenizerError(f"it is not what is in its file, {tokenizer.path}")
        return spec
    fast = _fast_one(tokenizer)
    if fast is None:
        raise UnportableTokenizerError(
            f"it is a {type(tokenizer).__name__}, neither one of megallm's nor a fast one of Hugging Face's"
        )
    return _fast_spec(fast)


def _fast_one(tokenizer: object) -> Any | None:  # Any: transformers' PreTrainedTokenizerFast
    """Finds Hugging Face's fast tokenizer, given itself or wrapped by megatron."""
    inner: object = getattr(tokenizer, "_tokenizer", None)
    for candidate in (tokenizer, inner, getattr(inner, "tokenizer", None)):
        if getattr(candidate, "backend_tokenizer", None) is not None:
            return candidate
    return None


def _fast_spec(fast: Any) -> TokenizerSpec:  # Any: the same
    template: object = getattr(fast, "chat_template", None)
    if isinstance(template, dict):  # several by name, of which requests may not choose
        template = cast("dict[str, str]", template).get("default")
    named: dict[str, object] = getattr(fast, "special_tokens_map", {})
    return TokenizerSpec(
        kind="fast",
        backend=fast.backend_tokenizer.to_str(),
        special_ids=SpecialIds(bos=fast.bos_token_id, eos=fast.eos_token_id),
        chat_template=template if isinstance(template, str) else None,
        special_tokens={name: token for name, token in named.items() if isinstance(token, str)},
        vocab_size=int(fast.vocab_size),
    )


def _agree(first: TokenizerAdapter, second: TokenizerAdapter, text: str) -> bool:
    """Whether both give the same ids for a text, as the engine and as a route asks, and its text back."""
    ids = first.tokenize(text)
    raw = [_encode(adapter.wrapped, text) for adapter in (first, second)]
    return (
        ids == second.tokenize(text)
        and raw[0] == raw[1]
        and first.detokenize(ids) == second.detokenize(ids)
        and first.detokenize(ids[:-1]) == second.detokenize(ids[:-1])
    )


def _encode(tokenizer: Any, text: str) -> list[int]:  # Any: either interface
    both = callable(getattr(tokenizer, "tokenize", None)) and callable(getattr(tokenizer, "detokenize", None))
    return list(tokenizer.tokenize(text) if both else tokenizer.encode(text))
