"""Tokenizers that go to other processes: an equal one comes out there, or the reason why none can."""

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from megallm.core_async.errors import InvalidRequestError
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.processes.tokenizer_spec import TokenizerSpec, UnportableTokenizerError, build, describe
from megallm.models.base_tokenizer import SpecialIds
from megallm.models.tokenizer import ByteLevelTokenizer, PieceTokenizer
from tests.byte_tokenizer import ByteTokenizer
from tests.http.small_tokenizer import small_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = "One text, two blanks:  and <|end|>"


def sent(spec: TokenizerSpec) -> TokenizerSpec:
    """Gives what arrives in the other process."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=TokenizerSpec)


def piece_backend() -> Tokenizer:
    """Gives a tokenizer whose vocabulary marks blanks, and that puts a bos before each text."""
    letters = ["<unk>", "<s>", "</s>", "\u2581", *map(chr, range(33, 127))]
    letters += [f"<0x{number:02X}>" for number in range(256)]
    vocab = {letter: index for index, letter in enumerate(letters)}
    model = models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return backend


class Fast:
    """What transformers' fast tokenizers look like from outside."""

    chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    bos_token_id = 1
    eos_token_id = 2
    special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>"}  # noqa: RUF012 - as transformers has it

    def __init__(self, *, cleans_up: bool = False) -> None:
        self.backend_tokenizer = piece_backend()
        self.vocab_size = self.backend_tokenizer.get_vocab_size()
        self._cleans_up = cleans_up

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text.replace(" ,", ",").replace(" .", ".") if self._cleans_up else text


class Inner:
    """What megatron's interface holds."""

    def __init__(self) -> None:
        self.tokenizer = Fast()


class WrappedByMegatron:
    """A fast tokenizer inside megatron's interface."""

    def __init__(self) -> None:
        self._tokenizer = Inner()
        self.bos, self.eod, self.vocab_size = 1, 2, 354

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.tokenizer.encode(text)

    def detokenize(self, ids: list[int]) -> str:
        return self._tokenizer.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte level", "pieces", "fast", "wrapped by megatron"])
def test_an_equal_tokenizer_comes_out(kind: str) -> None:
    """The text is made and split in the front end; another tokenizer there is another model's text."""
    ids = SpecialIds(bos=1, eos=2, unk=0)
    tokenizer = {
        "byte level": small_tokenizer,
        "pieces": lambda: PieceTokenizer(piece_backend(), special_ids=ids),
        "fast": Fast,
        "wrapped by megatron": WrappedByMegatron,
    }[kind]()
    original = TokenizerAdapter(tokenizer)
    copy = TokenizerAdapter(build(sent(describe(original))))
    tokens = original.tokenize(TEXT)
    assert copy.tokenize(TEXT) == tokens
    assert copy.detokenize(tokens) == original.detokenize(tokens)
    assert (copy.bos, copy.eod, copy.vocab_size) == (original.bos, original.eod, original.vocab_size)


def test_a_chat_template_comes_along() -> None:
    """Chats are rendered in the front end."""
    original = small_tokenizer()
    copy = build(sent(describe(TokenizerAdapter(original))))
    assert copy.apply_chat_template(MESSAGES) == original.apply_chat_template(MESSAGES)
    fast = build(sent(describe(TokenizerAdapter(Fast()))))
    assert fast.apply_chat_template(MESSAGES, tokenize=False) == "<s>hi"
    assert fast.apply_chat_template(MESSAGES) == fast.encode("<s>hi", add_special_tokens=False)


def test_a_fast_tokenizer_without_a_template_says_so() -> None:
    """The route makes a 400 of it."""
    fast = Fast()
    fast.chat_template = None  # type: ignore[assignment] - as transformers has it then
    copy = build(sent(describe(TokenizerAdapter(fast))))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        copy.apply_chat_template(MESSAGES)


def test_one_of_several_templates_is_the_one_called_default() -> None:
    """Some models bring one for tools and one for plain chats; a request can't choose."""
    fast = Fast()
    fast.chat_template = {"default": "plain", "tool_use": "tools"}  # type: ignore[assignment] - the same
    assert describe(TokenizerAdapter(fast)).chat_template == "plain"


def test_a_tokenizer_of_another_kind_is_refused_by_its_class() -> None:
    """Its code would have to travel, and code does not."""
    with pytest.raises(UnportableTokenizerError, match="it is a ByteTokenizer, neither one of megallm's nor"):
        describe(TokenizerAdapter(ByteTokenizer()))


def test_one_that_does_more_than_its_description_is_refused() -> None:
    """Some of Hugging Face's change the text after the library has made it."""
    with pytest.raises(UnportableTokenizerError, match=r"a copy of it treats .* otherwise"):
        describe(TokenizerAdapter(Fast(cleans_up=True)))


def test_one_with_other_ids_than_its_copy_is_refused() -> None:
    """A request would end at another token."""

    class Renamed(ByteLevelTokenizer):
        eod = 5  # type: ignore[assignment] - a caller's own idea

    original = small_tokenizer()
    backend = Tokenizer.from_str(original.to_json())
    assert isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
    renamed = Renamed(backend, special_ids=SpecialIds(eos=96))
    assert describe(TokenizerAdapter(renamed)).special_ids.eos == 5
