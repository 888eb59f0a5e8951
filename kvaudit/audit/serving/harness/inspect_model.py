"""Models of Inspect that kvaudit answers: ``kvaudit/CHECKPOINT@POLICY`` samples with a compressed cache.

The checkpoint is a folder, a hub id or ``embedded`` (the small model that ships). In the policy, write ";" instead of
",", as in ``kvaudit/embedded@snapkv:budget=96;window=8``. Waiting requests share a batch, as in ``kvaudit serve``.
Unsupported options are an error. ``ConditionAPI`` is the model class that a run uses when Inspect asks a suite. It
answers under a policy or by a serving engine, with seeds that are derived from sample, epoch and turn.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageUser,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Model,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    get_model,
    modelapi,
)
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolCall as InspectCall
from inspect_ai.tool import ToolChoice, ToolInfo

from kvaudit.audit.sampling.checkpoints import load_model_or_adapter
from kvaudit.audit.serving.engine import PendingAnswers, SamplingEngine
from kvaudit.audit.serving.wire import ChatRequest, Choice, read_request
from kvaudit.core.completions import split_thought
from kvaudit.core.errors import AuditError, SpecError

_ABOUT, _USE, _FORM = "kvaudit", "cache", "tool_form"  # keys in the metadata of an output
_CONNECTIONS = 32  # Inspect's default number of concurrent requests
_NAME = "served"
_REASONS = {"length": "max_tokens", "tool_calls": "tool_calls"}  # why an answer ended -> Inspect's word for it
_UNSUPPORTED = (
    *("frequency_penalty", "presence_penalty", "logit_bias", "top_k", "response_schema", "logprobs", "top_logprobs"),
    *("reasoning_effort", "reasoning_tokens", "reasoning_mode", "effort", "verbosity", "modalities", "prompt_logprobs"),
    "extra_body",
)
_COUNTS = ("num_choices", "best_of")  # supported only with 1


def output_facts(output: Any) -> tuple[dict[str, Any], str]:
    """Return what a kvaudit model has written into the metadata of an output of Inspect.

    These are the measurements of the cache ({} if there are none), and the name of the syntax of its tool calls ("" if
    unknown).
    """
    about = (output.metadata or {}).get(_ABOUT, {}) if output is not None else {}
    return about.get(_USE, {}), about.get(_FORM, "")


class AnswerSource(Protocol):
    """An object that answers chat requests: a ``SamplingEngine`` or a ``BatchedModel``."""

    def submit(self, request: ChatRequest) -> tuple[int, PendingAnswers]:
        """Queue a request; return the number of its prompt tokens, and the future answers."""

    def close(self) -> None:
        """Stop answering."""


class _KvauditModel(ModelAPI):  # type: ignore[misc]  # where Inspect is not installed it has no types
    """A model of Inspect that sends each conversation, with its tools, to ``source``.

    ``served`` is the model name in these requests.
    """

    source: AnswerSource
    served: str

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Return one answer; raise SpecError for unsupported options."""
        return await self.answer(self.request(input, tools, tool_choice, config))

    def request(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolInfo], choice: ToolChoice, config: GenerateConfig
    ) -> ChatRequest:
        """Convert a request of Inspect to one of kvaudit's server; if it sets no temperature, it becomes greedy."""
        _check_settings(config)
        return read_request(
            {
                "model": self.served,
                "messages": [_row(message) for message in messages],
                "tools": [_tool(tool) for tool in tools] or None,
                "tool_choice": choice,
                "parallel_tool_calls": config.parallel_tool_calls,
                "max_tokens": config.max_tokens,
                "temperature": 0.0 if config.temperature is None else config.temperature,
                "top_p": config.top_p,
                "seed": config.seed,
                "stop": [text for text in config.stop_seqs or () if text],
            }
        )

    async def answer(self, request: ChatRequest) -> ModelOutput:
        """Return the answer to a request."""
        # in threads, because rendering a template and reading calls may wait for another process
        prompt, answers = await asyncio.to_thread(self.source.submit, request)
        (choice,) = await asyncio.wrap_future(answers)
        if answers.reader is not None:
            choice = await asyncio.to_thread(answers.reader.read, choice)
        about = {} if choice.use is None else choice.use._asdict()
        return self._output(choice, prompt, {_USE: about, _FORM: answers.tool_form})

    def _output(self, choice: Choice, prompt: int, about: dict[str, Any]) -> ModelOutput:
        *thoughts, answer = split_thought(choice.text, is_open=None)
        reasoning = [ContentReasoning(reasoning=thought.content) for thought in thoughts]
        message = ChatMessageAssistant(
            content=[*reasoning, ContentText(text=answer.content)] if reasoning else answer.content,
            tool_calls=[InspectCall(call.call_id, call.name, dict(call.arguments)) for call in choice.calls] or None,
            model=self.model_name,
            source="generate",
        )
        new = len(choice.tokens)
        return ModelOutput(
            model=self.model_name,
            choices=[
                ChatCompletionChoice(message=message, stop_reason=_REASONS.get(choice.finish_reason, "stop")),
            ],
            usage=ModelUsage(input_tokens=prompt, output_tokens=new, total_tokens=prompt + new),
            metadata={_ABOUT: about},
        )

    def max_connections(self) -> int:
        return _CONNECTIONS

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        self.source.close()


class KvauditAPI(_KvauditModel):
    """Inspect's model ``kvaudit/CHECKPOINT@POLICY``; takes the model arguments ``dtype`` and ``device`` (``-M``)."""

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
        engine = SamplingEngine({_NAME: load_model_or_adapter(checkpoint, **{"dtype": "float32", **options})})
        policy = policy.replace(";", ",")  # Inspect would read a comma as the start of another model
        self.source, self.served = engine, f"{_NAME}@{policy or 'none'}"
        engine.resolve(self.served)  # raises for an unknown policy


@modelapi(name="kvaudit")  # type: ignore[untyped-decorator]
def kvaudit() -> type[ModelAPI]:
    """Return the class that Inspect uses for ``kvaudit/`` models."""
    return KvauditAPI


# --- the condition of a run -------------------------------------------------------------------------------------------


@dataclass
class _SampleTurns:
    """The sample that Inspect is running, and how many answers (turns) it has requested so far."""

    sample: str
    epoch: int
    turns: int = 0


_PLAYING: ContextVar[_SampleTurns] = ContextVar("kvaudit_sample")  # of the coroutine that runs the sample


@solver  # type: ignore[untyped-decorator]
def note_sample() -> Solver:
    """Return the solver that comes first in every task of a run: it notes which sample is running.

    The seeds of the sample's answers are derived from this note.
    """

    async def solve(state: TaskState, generate: Generate) -> TaskState:  # noqa: ARG001
        _PLAYING.set(_SampleTurns(str(state.sample_id), state.epoch))
        return state

    return solve


class ConditionAPI(_KvauditModel):
    """The model that answers Inspect's requests in a run, under one of its policies or by an engine with settings.

    ``condition_model`` makes it. ``fault`` is the first error that concerns every sample, such as an unsupported
    setting; all later requests fail with it.
    """

    seed_of: Callable[[str, int, int], int]  # of sample id, epoch and turn
    fault: AuditError | None = None

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Return one answer, sampled with the seed of its sample, epoch and turn."""
        if self.fault is not None:
            raise self.fault
        current = _PLAYING.get(None)
        if current is None:  # scorers run in a context without the first step
            self.fault = SpecError(
                "a scorer asks the model under test to grade its own answers; give the task another judge by an "
                "argument, such as openai-api/NAME/MODEL"
            )
            raise self.fault
        current.turns += 1
        seed = self.seed_of(current.sample, current.epoch, current.turns - 1)
        try:
            self.request(_TRIAL, tools, tool_choice, config)
        except AuditError as error:  # with these settings every sample would fail
            self.fault = error
            raise
        return await self.answer(replace(self.request(input, tools, tool_choice, config), seed=seed))


CONDITION = "kvaudit-condition"


@modelapi(name=CONDITION)  # type: ignore[untyped-decorator]
def condition() -> type[ModelAPI]:
    """Return the class of the models that Inspect knows as ``kvaudit-condition/NAME``.

    NAME is a policy, or an engine with its settings. A run uses such models if Inspect asks its suites. Inspect calls
    this function whenever it makes one.
    """
    return ConditionAPI


def condition_model(name: str, source: AnswerSource, seed_of: Callable[[str, int, int], int]) -> Model:
    """Return an Inspect model (with a ``ConditionAPI``) whose requests ``source`` answers.

    ``seed_of`` gives the seed of an answer from its sample id, epoch and turn.
    """
    model = get_model(f"{CONDITION}/{name}", memoize=False)
    # not as arguments of the model, which Inspect writes into its log
    model.api.source, model.api.seed_of, model.api.served = source, seed_of, name
    # Inspect's cache of answers, which a task may switch on, identifies a model by name and address
    model.api.base_url = f"kvaudit-{secrets.token_hex(8)}"
    return model


# --- requests ---------------------------------------------------------------------------------------------------------


_TRIAL = (ChatMessageUser(content="."),)


def _check_settings(config: GenerateConfig) -> None:
    """Raise SpecError for settings that kvaudit's samplers do not support."""
    settings = config.model_dump()
    names = [name for name in _UNSUPPORTED if settings.get(name)]
    names += [name for name in _COUNTS if settings.get(name) not in (None, 1)]
    if names:
        raise SpecError(f"{names[0]} is set, which this sampler does not support; leave it out")


def _tool(tool: ToolInfo) -> Mapping[str, Any]:
    parameters = tool.parameters.model_dump(exclude_none=True, by_alias=True)
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def _row(message: ChatMessage) -> dict[str, Any]:
    """Return a message as the dict that endpoints take; raise SpecError for content other than text."""
    if not isinstance(message.content, str) and any(part.type not in ("text", "reasoning") for part in message.content):
        raise SpecError("a message holds content other than text, which no model here can read")
    row: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.role == "assistant" and message.tool_calls:
        row["tool_calls"] = [
            {
                "id": str(call.id),
                "type": "function",
                "function": {"name": call.function, "arguments": json.dumps(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        row["tool_call_id"] = message.tool_call_id
        if message.error is not None:
            row["content"] = f"Error: {message.error.message}"  # as Inspect tells it to servers
    return row
