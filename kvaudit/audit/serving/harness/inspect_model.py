"""``kvaudit`` as a model of Inspect: ``kvaudit/CHECKPOINT@POLICY`` answers through a compressed cache.

The checkpoint is a folder, a hub id or ``embedded``; write ";" for "," in the policy. Waiting requests share a batch,
as in ``kvaudit serve``; unsupported options are an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from kvaudit.audit.sampling.checkpoints import load_model_or_adapter
from kvaudit.audit.serving.engine import SamplingEngine
from kvaudit.audit.serving.wire import ChatRequest
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Message, Role
from kvaudit.suites.inspect_plan import unsupported_settings

_CONNECTIONS = 32  # Inspect's default number of concurrent requests
_NAME = "served"


class KvauditAPI(ModelAPI):  # type: ignore[misc]  # where Inspect is not installed it has no types
    """A checkpoint under a policy; ``dtype`` and ``device`` are model arguments (``-M dtype=bfloat16``)."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),
        **options: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        if unknown := sorted(set(options) - {"dtype", "device"}):
            raise SpecError(f"model argument {unknown[0]!r} is not known; known are dtype and device")
        checkpoint, _, policy = model_name.partition("@")
        self._engine = SamplingEngine({_NAME: load_model_or_adapter(checkpoint, **{"dtype": "float32", **options})})
        policy = policy.replace(";", ",")  # Inspect would read a comma as the start of another model
        self._served = f"{_NAME}@{policy or 'none'}"
        self._engine.resolve(self._served)  # raises for an unknown policy

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,  # noqa: ARG002 - without tools there is nothing to choose
        config: GenerateConfig,
    ) -> ModelOutput:
        """Return one answer; raise SpecError for unsupported options."""
        if tools:
            raise SpecError("tools are not supported; use a solver that puts them into the text")
        prompt, answers = self._engine.submit(_request(self._served, input, config))
        (choice,) = await asyncio.wrap_future(answers)
        reason = {"length": "max_tokens"}.get(choice.finish_reason, "stop")
        message = ChatMessageAssistant(content=choice.text, model=self.model_name, source="generate")
        new = len(choice.tokens)
        return ModelOutput(
            model=self.model_name,
            choices=[ChatCompletionChoice(message=message, stop_reason=reason)],
            usage=ModelUsage(input_tokens=prompt, output_tokens=new, total_tokens=prompt + new),
        )

    def max_connections(self) -> int:
        return _CONNECTIONS

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        self._engine.close()


@modelapi(name="kvaudit")  # type: ignore[untyped-decorator]
def kvaudit() -> type[ModelAPI]:
    """Return the class that Inspect uses for ``kvaudit/`` models."""
    return KvauditAPI


def _request(model: str, messages: Sequence[ChatMessage], config: GenerateConfig) -> ChatRequest:
    """Return a request of Inspect as one of our server; greedy if it sets no temperature."""
    if unsupported := unsupported_settings(config):
        raise SpecError(f"{unsupported[0]} is set, which this sampler does not support; leave it out")
    return ChatRequest(
        model=model,
        messages=tuple(_message(message) for message in messages),
        max_tokens=config.max_tokens,
        temperature=0.0 if config.temperature is None else config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        seed=config.seed,
        choices=1,
        stop=tuple(config.stop_seqs or ()),
        logprobs=False,
        stream=False,
        usage_in_stream=False,
    )


def _message(message: ChatMessage) -> Message:
    if not isinstance(message.content, str) and any(part.type not in ("text", "reasoning") for part in message.content):
        raise SpecError("a message holds content other than text, which no model here can read")
    return Message(Role(message.role), message.text)
