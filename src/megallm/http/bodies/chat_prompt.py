"""The prompt of a chat request as token ids; earlier answers keep the very tokens they were made of."""

from anyio import to_thread

from megallm.http.bodies.chat_template import ChatTemplate, JsonObject, template_options
from megallm.http.bodies.prompts import LONG_TEXT
from megallm.http.bodies.schema_chat import ChatRequest, Message
from megallm.http.errors import RequestError
from megallm.http.service import Service


async def chat_prompt(service: Service, request: ChatRequest, tools: list[JsonObject] | None) -> list[int]:
    """Gives the token ids of a conversation, off the loop when that takes long.

    Raises: RequestError.
    """
    writer = _PromptWriter(service, request, tools)
    is_long = sum(_length_of(message) for message in request.messages) > LONG_TEXT
    return await to_thread.run_sync(writer.token_ids) if is_long else writer.token_ids()


class _PromptWriter:
    """Makes the prompt of one request. Touches no loop."""

    def __init__(self, service: Service, request: ChatRequest, tools: list[JsonObject] | None) -> None:
        self._service = service
        self._template: ChatTemplate = service.chat_template
        self._request = request
        self._tools = tools
        self._options = template_options(request)
        self._messages = self._template.messages_of(request.messages)

    def token_ids(self) -> list[int]:
        """Gives the ids."""
        request = self._request
        goes_on = bool(request.continue_final_message)
        begins = not goes_on if request.add_generation_prompt is None else request.add_generation_prompt
        if goes_on and begins:
            raise RequestError(
                "add_generation_prompt and continue_final_message are both true; give one of the two",
                param="continue_final_message",
            )
        text = self._render(self._messages, begins_answer=begins)
        if goes_on:
            text = self._cut_after_content(text)
        ids = self._encode(text)
        return ids if request.prevent_retokenization is False else self._with_exact_tokens(ids)

    def _render(self, messages: list[JsonObject], *, begins_answer: bool) -> str:
        return self._template.render(
            messages, tools=self._tools, options=self._options, begins_answer=begins_answer
        )

    def _encode(self, text: str) -> list[int]:
        return self._service.encoder.encode(text, begins=False)

    def _cut_after_content(self, text: str) -> str:
        """Gives the text up to the end of the last message's content."""
        content = str(self._messages[-1]["content"]).strip()
        end = text.rfind(content)
        if not content or end < 0:
            raise RequestError(
                "continue_final_message is true and the last message has no content to go on from",
                param="continue_final_message",
            )
        return text[: end + len(content)]

    def _with_exact_tokens(self, ids: list[int]) -> list[int]:
        """Puts the tokens of the last answer that names its own in the place of what its text gives.

        What is replaced ends with the last end-of-sequence token that the conversation up to that
        answer renders to; where there is none, nothing is.
        """
        place = _last_exact(self._request.messages)
        eod = self._service.tokenizer.eod
        if place is None or eod is None:
            return ids
        message = self._request.messages[place]
        exact = [*(message.prompt_token_ids or ()), *(message.generation_token_ids or ())]
        rendered = self._encode(self._render(self._messages[: place + 1], begins_answer=False))
        end = len(rendered) - 1
        while end >= 0 and rendered[end] != eod:
            end -= 1
        if end < 0 or ids[: end + 1] != rendered[: end + 1]:
            return ids
        if exact[-1] == eod:
            exact.pop()
        return [*exact, *ids[end:]]


def _last_exact(messages: list[Message]) -> int | None:
    """Gives the place of the last answer that carries its tokens."""
    for place in range(len(messages) - 1, -1, -1):
        message = messages[place]
        if message.role == "assistant" and message.prompt_token_ids and message.generation_token_ids:
            return place
    return None


def _length_of(message: Message) -> int:
    content = message.content
    if content is None or isinstance(content, str):
        return len(content or "")
    return sum(len(part.text or "") for part in content)
