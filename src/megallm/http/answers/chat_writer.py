"""Writes the choices of a chat request, whole or in chunks. Knows the protocol's shapes, no engine."""

from msgspec import Struct, field

from megallm.core_async.messages import Completion, Delta
from megallm.http.answers.exact_tokens import ending_fields, token_fields
from megallm.http.answers.generation import Generation
from megallm.http.answers.log_probs import chat_entries, finite
from megallm.http.answers.replies import now, response_id
from megallm.http.answers.sse import ChunkFrames, frame
from megallm.http.bodies.schema_chat import ChatRequest
from megallm.http.parsers.pieces import (
    Content,
    OutputParser,
    Piece,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    join_pieces,
)
from megallm.http.service import Service

type JsonObject = dict[str, object]


class _Streamed(Struct):
    """How far one choice's stream is."""

    parser: OutputParser
    has_begun: bool = False
    has_calls: bool = False
    log_probs: list[JsonObject] = field(default_factory=list[JsonObject])
    """Of tokens whose text was not sent yet."""
    token_ids: list[int] = field(default_factory=list[int])


class ChatWriter:
    """Writes one response; each choice has a parser of its own."""

    def __init__(
        self,
        service: Service,
        request: ChatRequest,
        generation: Generation,
        parsers: list[OutputParser],
        *,
        is_named: bool,
    ) -> None:
        """`is_named`: the request names the tool to call, which the finish reason does not repeat."""
        self._id, self._created = response_id("chatcmpl"), now()
        self._model = service.settings.model_name
        self._chunks = ChunkFrames(self._head("chat.completion.chunk"))
        self._vocabulary = service.vocabulary
        self._generation = generation
        self._num_top = request.top_logprobs or 0
        self._returns_token_ids = bool(request.return_token_ids)
        self._one_call = request.parallel_tool_calls is False
        self._is_named = is_named
        self._streams = [_Streamed(parser) for parser in parsers]

    # ---- whole ---------------------------------------------------------------------------------

    def whole(self, completions: list[Completion]) -> JsonObject:
        """Gives the response of a request that is not streamed."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        usage = self._generation.usage.as_json()
        return {**self._head("chat.completion"), "choices": choices, "usage": usage}

    def _choice(self, index: int, completion: Completion) -> JsonObject:
        parser = self._streams[index].parser
        pieces = self._kept(join_pieces([*parser.feed(completion.text), *parser.finish()]))
        calls = _calls_of(pieces)
        message = _message_of(pieces, calls)
        message["prompt_token_ids"] = self._generation.choices[index].prompt
        message |= token_fields(completion)
        if completion.prompt_log_probs:
            message["prompt_log_probs"] = [finite(each) for each in completion.prompt_log_probs]
        choice: JsonObject = {
            "index": index,
            "message": message,
            "logprobs": self._log_probs(completion),
            "finish_reason": self._finish_reason(completion.finish_reason, has_calls=bool(calls)),
            "stop_reason": completion.stop_reason,
        }
        if self._returns_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    # ---- streams -------------------------------------------------------------------------------

    def chunks(self, index: int, delta: Delta) -> bytes:
        """Gives the frames of one choice's news, the role before the first; with its last, its end."""
        stream = self._streams[index]
        frames: list[bytes] = []
        if not stream.has_begun:
            stream.has_begun = True
            first: JsonObject = {"index": index, "delta": {"role": "assistant", "content": ""}}
            if self._returns_token_ids:
                first["prompt_token_ids"] = self._generation.choices[index].prompt
            frames.append(self._chunks.chunk({**first, "logprobs": None, "finish_reason": None}))
        if delta.log_probs is not None:
            stream.log_probs += self._entries(delta)
        stream.token_ids += delta.token_ids
        pieces = stream.parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += stream.parser.finish()
        for piece in self._kept(pieces):
            stream.has_calls |= isinstance(piece, ToolCallStart)
            news = {"index": index, "delta": _delta_of(piece), **self._taken(stream), "finish_reason": None}
            frames.append(self._chunks.chunk(news))
        if delta.finish_reason is not None:
            reason = self._finish_reason(delta.finish_reason, has_calls=stream.has_calls)
            ending = {"finish_reason": reason, "stop_reason": delta.stop_reason}
            fields = ending_fields(self._generation.streamed(index))
            frames.append(
                self._chunks.chunk({"index": index, "delta": {}, **self._taken(stream), **ending, **fields})
            )
        return b"".join(frames)

    def usage_chunk(self) -> bytes:
        """Gives the frame of the token counts."""
        usage = self._generation.usage.as_json()
        return frame({**self._head("chat.completion.chunk"), "choices": [], "usage": usage})

    def _taken(self, stream: _Streamed) -> JsonObject:
        """Gives the log-probs and tokens that were not sent yet, with the next text that is."""
        taken: JsonObject = {"logprobs": {"content": stream.log_probs} if stream.log_probs else None}
        if self._returns_token_ids:
            taken["token_ids"] = stream.token_ids
        stream.log_probs, stream.token_ids = [], []
        return taken

    # ---- both ----------------------------------------------------------------------------------

    def _head(self, kind: str) -> JsonObject:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        """Leaves out the calls after the first where the request wants one at a time."""
        if not self._one_call:
            return pieces
        return [
            piece
            for piece in pieces
            if not isinstance(piece, ToolCallStart | ToolCallArguments) or piece.index == 0
        ]

    def _finish_reason(self, reason: str, *, has_calls: bool) -> str:
        return "tool_calls" if reason == "stop" and has_calls and not self._is_named else reason

    def _log_probs(self, completion: Completion) -> JsonObject | None:
        return None if completion.log_probs is None else {"content": self._entries(completion)}

    def _entries(self, news: Completion | Delta) -> list[JsonObject]:
        return chat_entries(self._vocabulary, news.token_ids, news.log_probs or [], news.top, self._num_top)


def _message_of(pieces: list[Piece], calls: list[JsonObject]) -> JsonObject:
    """Gives the assistant's message that an output's pieces are."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    message: JsonObject = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _calls_of(pieces: list[Piece]) -> list[JsonObject]:
    """Gives the tool calls among an output's joined pieces."""
    arguments = {piece.index: piece.fragment for piece in pieces if isinstance(piece, ToolCallArguments)}
    return [
        {
            "id": piece.id,
            "type": "function",
            "function": {"name": piece.name, "arguments": arguments.get(piece.index, "")},
        }
        for piece in pieces
        if isinstance(piece, ToolCallStart)
    ]


def _delta_of(piece: Piece) -> JsonObject:
    """Gives the part of a streamed message that a piece is."""
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolCallArguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
