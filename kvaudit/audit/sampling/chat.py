"""Render conversations as tokens with any chat template, turn by turn, and find the role of every token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from kvaudit.audit.sampling.chat_tools import (
    PROBE,
    PROBE_TEXTS,
    TOOL_SLOT,
    ArgumentsAs,
    ResponseTemplate,
    differing_part,
    slot_calls,
    slot_name,
    tool_fields,
)
from kvaudit.audit.sampling.rendering import TemplateRefusal, has_address, renderer, unstable_names
from kvaudit.core.completions import THOUGHT_CLOSING, THOUGHT_OPENING
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Message, Role, ToolCall
from kvaudit.core.spans import Place, Span, find_spans
from kvaudit.core.tool_forms.base import TOOL_FORMS, ToolForm, Tools, form_of
from kvaudit.core.tool_forms.text import TextForm, as_text, list_tools, text_without_calls

FORMAT_ROLE = "format"  # tokens of the template itself: headers, end-of-turn, generation prompt
TOOL_PREFIX = "Tool result:\n"
_MARKER = "kvaudit-marker-7391"  # stands for an answer, to find its position in the rendered text
_TORN, _MOST_BYTES = "\ufffd", 4  # decoded form of an incomplete character; bytes of the longest character
_SHORT, _MOST_COUNTS = 2_000, 20_000  # characters of a text whose token count is cached; number of cached counts
_SLOT = "kvaudit-slot-{}-7391"
TOOL_FORM = "tool_form"  # kvaudit's own option, which names a form
TEXT_FORM, ANY_FORM = TextForm.name, "any"  # tools as text; a template with tools whose form of calls is unknown
ChatOption = bool | int | float | str
# arguments of transformers' renderer, which an option of the same name would replace
_RESERVED = (
    *("messages", "conversations", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
)
# conversations in which an option may make a difference: with a system prompt, without, with an earlier thought
_PROBES: list[list[dict[str, str]]] = [
    [{"role": "system", "content": "."}, {"role": "user", "content": "."}],
    [{"role": "user", "content": "."}],
    [
        {"role": "user", "content": "."},
        {"role": "assistant", "content": f"{THOUGHT_OPENING}.{THOUGHT_CLOSING}."},
        {"role": "user", "content": "."},
    ],
]


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """Token ids with one role name per token: system, user, assistant, tool, or format (the template's own text).

    A span is a text that the suite marks. ``spans`` maps its name to the indices of all tokens that hold at least one
    character of this text.
    """

    ids: tuple[int, ...]
    roles: tuple[str, ...]
    spans: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.roles)

    def drop(self, count: int) -> ChatTokens:
        """Return the tokens after the first ``count``, with their roles and spans."""
        spans = {name: tuple(n - count for n in numbers if n >= count) for name, numbers in self.spans.items()}
        return ChatTokens(self.ids[count:], self.roles[count:], spans)


class Chat:
    """A fast tokenizer with its chat template, which renders the first prompt and what follows each answer.

    ``tool_role`` and ``system_role`` are "native" if the template accepts that role, "user" if its text is put into
    a user message. ``opens_thought`` is True if every prompt ends with the opening tag of a thought (reasoning).
    ``stop_ids`` are all tokens that end an assistant turn. ``options`` are passed to the template as its variables.
    """

    def __init__(
        self, tokenizer: Any, stop_ids: Iterable[int] = (), options: Mapping[str, ChatOption] | None = None
    ) -> None:
        if not tokenizer.is_fast:
            raise SpecError(f"tokenizer {type(tokenizer).__name__} has no offsets; kvaudit needs a fast tokenizer")
        if not tokenizer.chat_template:
            raise SpecError("the tokenizer has no chat template; use an instruct model, or set chat_template")
        self.tokenizer = tokenizer
        self._counts: dict[str, int] = {}
        self._source, self._tokens = _template_of(tokenizer), dict(tokenizer.special_tokens_map)
        self._tool_source = _template_of(tokenizer, [TOOL_SLOT])  # a tokenizer may have a template for tools alone
        self.options = dict(options or {})
        form_name = self.options.pop(TOOL_FORM, None)
        self._named_form = None if form_name is None else TOOL_FORMS.get(str(form_name))()
        self._check_options()
        self.system_role: Literal["native", "user"] = self._role_support(Role.SYSTEM, first=True)
        self.tool_role: Literal["native", "user"] = self._role_support(Role.TOOL, first=False)
        self.opens_thought = self._template([Message(Role.USER, ".")]).rstrip().endswith(THOUGHT_OPENING)
        self.stop_ids: frozenset[int] = frozenset(stop_ids) | self._template_stops()

    def prompt(self, messages: Sequence[Message], spans: Sequence[Span] = (), tools: Tools = ()) -> ChatTokens:
        """Return the prompt as tokens; it ends with the header of the answer.

        ``spans`` are the texts that the suite marks; the result has the indices of their tokens. A span with the text
        ``list_tools(tools)`` marks the list of the tools, in whatever form the template writes it.
        """
        return self._render((), *self.request_of(messages, tools), spans)

    def prompt_text(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Return the prompt as text, including the generation prompt (the header of the answer)."""
        return self._text_after((), *self.request_of(messages, tools))

    # --- tools ------------------------------------------------------------------------------------------------------

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """The syntax of tool calls that the options name, else the tokenizer, else the template; None if none does."""
        if self._named_form is not None:
            return self._named_form
        template = getattr(self.tokenizer, "response_template", None)  # only newer versions of transformers have it
        if isinstance(template, Mapping):
            return ResponseTemplate(template, self._template([Message(Role.USER, ".")]))
        return form_of(self._tool_source)

    def tool_form_of(self, messages: Sequence[Message], tools: Tools) -> str:
        """Return the name of the form (syntax) of a conversation's tools and calls; "" if it has neither.

        The name is "text" if kvaudit writes the tools into the prompt as text, because the options say so or because
        the template cannot write them. It is "any" if the template writes them, but in an unknown syntax of calls.
        """
        if not tools and not any(message.tool_calls for message in messages):
            return ""
        if isinstance(self._named_form, TextForm) or not self._renders_tools(messages, tools):
            return TEXT_FORM
        return ANY_FORM if self.tool_form is None else self.tool_form.name

    def reader_of(self, tool_form: str) -> ToolForm | None:
        """Return the syntax in which tool calls are read from answers; None if every known syntax is tried.

        ``tool_form`` is the name that ``tool_form_of`` returns for the conversation.
        """
        return self.tool_form if tool_form not in (TEXT_FORM, ANY_FORM) else None

    @property
    def moves_system_with_tools(self) -> bool:
        """Whether a system prompt is put into the user's message in conversations with tools, and only in those."""
        return self.system_role == "native" and self._arguments_as is not None and self._system_with_tools == "user"

    def request_of(
        self, messages: Sequence[Message], tools: Tools
    ) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
        """Return the messages and tools of a conversation as they are passed to the template.

        If the prompt has to contain the tools as text, they are added to the messages, and no tools are returned. If
        not, tool calls are removed from the text of messages, since the template writes the calls itself.
        """
        form = self.tool_form_of(messages, tools)
        if form == TEXT_FORM:
            return as_text(messages, tools), ()
        if form:
            reader = self.reader_of(form)
            messages = [replace(message, content=text_without_calls(message, tools, reader)) for message in messages]
        return tuple(messages), tuple(tools)

    def call_text(self, messages: Sequence[Message], calls: Sequence[ToolCall], tools: Tools) -> str | None:
        """Return the text that the model would write for tool calls; None if the template does not write calls.

        To find it, the template renders ``messages`` with the calls as the next turn, and the text of that turn is cut
        out. It is None too if with this turn the template renders the messages before it differently.
        """
        calls = [replace(call, call_id=f"call{number:05}") for number, call in enumerate(calls)]
        # with results, since some templates end a turn by the beginning of the next
        results = [Message(Role.TOOL, ".", tool_call_id=call.call_id) for call in calls]
        turns = [*messages, Message(Role.ASSISTANT, "", tuple(calls)), *results]
        if self.tool_form_of(turns, tools) in ("", TEXT_FORM):
            return None
        prompt, whole = self.prompt_text(messages, tools), self.prompt_text(turns, tools)
        answer = whole[len(prompt) :]
        ends = [index for stop in self._stop_texts if (index := answer.find(stop)) >= 0]
        return answer[: min(ends)] if ends and whole.startswith(prompt) else None

    @cached_property
    def _arguments_as(self) -> ArgumentsAs | None:
        """How the template takes a tool call's arguments: an "object" or JSON "text"; None if it takes no tools."""
        for arguments_as in ("object", "text"):
            try:
                text = self._apply(self._rows(PROBE, arguments_as), [TOOL_SLOT])
            except TemplateRefusal:
                continue
            if all(probe in text for probe in PROBE_TEXTS) and text.count(PROBE_TEXTS[0]) > 1:
                return arguments_as
        return None

    @cached_property
    def _system_with_tools(self) -> Literal["native", "user"]:
        """The role of a system prompt in conversations with tools: "user" if the template drops it, else "native"."""
        rows = move_roles([Message(Role.SYSTEM, _MARKER), *PROBE], set(), self._arguments_as or "object")
        try:
            is_kept = self.system_role == "native" and _MARKER in self._apply(rows, [TOOL_SLOT])
        except TemplateRefusal:
            is_kept = False
        return "native" if is_kept else "user"

    def _renders_tools(self, messages: Sequence[Message], tools: Tools) -> bool:
        """Return whether the template, rendering a conversation, writes all of its tools, messages and tool calls."""
        if self._arguments_as is None:
            return False
        slots = slot_calls(
            _with_slots([replace(m, content=text_without_calls(m, tools, self.tool_form)) for m in messages])
        )
        parts = [slot_name(n, k) for n, message in enumerate(slots) for k in range(len(message.tool_calls))]
        parts += [message.content for message in slots] + ([PROBE_TEXTS[0]] if tools else [])
        try:
            text = self._apply(self._rows(slots, self._arguments_as), [TOOL_SLOT] if tools else [])
        except TemplateRefusal:
            return False
        return all(piece in text for piece in parts)

    @property
    def unstable_names(self) -> list[str]:
        """What in the template may make its output differ from day to day: names such as strftime_now, addresses."""
        names = {*unstable_names(self._source), *unstable_names(self._tool_source)}
        if has_address(self._template([Message(Role.USER, ".")])):
            names.add("an object's address")
        return sorted(names)

    def reply(
        self,
        messages: Sequence[Message],
        spans: Sequence[Span] = (),
        *,
        calls: Sequence[ToolCall] = (),
        tools: Tools = (),
    ) -> ChatTokens:
        """Return the tokens after an assistant's answer: its end-of-turn, the new ``messages``, the generation prompt.

        To work with any template, a conversation is rendered in which a marker stands for the answer, and the text
        after the marker is cut out. If the model sampled an end-of-turn token itself, the first of these tokens are in
        the answer already: see ``continuation``. ``calls`` are the tool calls of the answer, ``tools`` the tools of the
        conversation; both are empty if the prompt contains the tools as text.
        """
        if calls and self._arguments_as is not None:
            # some templates write a tool's result only after its call
            last_call = replace(calls[-1], arguments={**calls[-1].arguments, _MARKER: _MARKER})
            before = (Message(Role.USER, "."), Message(Role.ASSISTANT, "", (*calls[:-1], last_call)))
            try:
                return self._render(before, messages, tools, spans)
            except SpecError:  # more calls at once than the template writes
                pass
        # begin with a user: many templates refuse a conversation that begins with the assistant
        return self._render((Message(Role.USER, "."), Message(Role.ASSISTANT, _MARKER)), messages, tools, spans)

    def continuation(
        self,
        completion: Sequence[int],
        messages: Sequence[Message],
        spans: Sequence[Span] = (),
        *,
        calls: Sequence[ToolCall] = (),
        tools: Tools = (),
    ) -> ChatTokens:
        """Return the tokens of ``reply`` that the completion does not hold already.

        ``reply`` begins with the end of the answer. If ``completion`` ends with an end-of-turn token, the tokens of
        ``reply`` up to and including this token are left out.
        """
        rendered = self.reply(messages, spans, calls=calls, tools=tools)
        if completion and completion[-1] in self.stop_ids:
            # search only before the next message's text, which may hold the same token
            lead = next((i for i, role in enumerate(rendered.roles) if role != FORMAT_ROLE), len(rendered.ids))
            if completion[-1] in rendered.ids[:lead]:
                return rendered.drop(rendered.ids.index(completion[-1]) + 1)
        return rendered

    @property
    def end_of_turn(self) -> int:
        """The token by which the model ends an answer; raises SpecError if the template has none."""
        # the template's ending comes first: the tokenizer's eos may end a text and not a turn
        candidates = [*self.reply([Message(Role.USER, ".")]).ids[:1], self.tokenizer.eos_token_id]
        token = next((token for token in candidates if token in self.stop_ids), None)
        if token is None:
            raise SpecError("the chat template has no token that ends an answer; use an instruct model")
        return int(token)

    def text(self, ids: Sequence[int]) -> str:
        """Return a completion as text without a final stop token; other special tokens stay visible."""
        tokens = list(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)
        decoded: str = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return decoded

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds, for display; a character of several tokens belongs to the last one."""
        texts: list[str] = []
        before: list[int] = []
        pending: list[int] = []
        for number, token in enumerate(ids, 1):
            pending.append(token)
            # decode with the tokens before, since some tokenizers drop a space at the beginning of a text
            text_before, text = (
                self.tokenizer.decode(tokens, skip_special_tokens=False) for tokens in (before, [*before, *pending])
            )
            # an incomplete character waits for the next token; not for ever, since U+FFFD may be in the text itself
            if text.endswith(_TORN) and len(pending) < _MOST_BYTES and number < len(ids):
                texts.append("")
                continue
            texts.append(text[len(text_before) :])
            before, pending = pending, []
        return texts

    def encode(self, text: str) -> tuple[int, ...]:
        """Return a text as tokens, without special tokens."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens."""
        count = self._counts.get(text)
        if count is None:
            count = len(self.encode(text))
            # short texts recur in many rows; a long passage is seldom counted twice
            if len(text) <= _SHORT and len(self._counts) < _MOST_COUNTS:
                self._counts[text] = count
        return count

    def to_json(self) -> dict[str, Any]:
        """Return what a run stores about its chat template: its options, and how it takes system and tool roles."""
        named = {} if self._named_form is None else {TOOL_FORM: self._named_form.name}
        return {"options": self.options, "system_role": self.system_role, "tool_role": self.tool_role, **named}

    def role_notes(self) -> list[str]:
        """Return one sentence for each role that the template does not accept; it says where such texts are put."""
        roles = (("system", self.system_role, "system prompts"), ("tool", self.tool_role, "tool results"))
        text = "the template takes no {} role: {} stand in the user's message"
        return [text.format(role, texts) for role, support, texts in roles if support == "user"]

    def _role_support(self, role: Role, *, first: bool) -> Literal["native", "user"]:
        """Return "native" if the template writes messages of ``role``, "user" if their text must go into user messages.

        The role is tried at the beginning of a conversation if ``first`` is True, else at its end.
        """
        turns = [Message(Role.USER, "."), Message(Role.ASSISTANT, ".")]
        probe = Message(role, _MARKER)
        # in its usual position, or the template would refuse the order instead of the role
        messages = [probe, *turns[:1]] if first else [*turns, probe]
        try:
            return "native" if _MARKER in self._apply(move_roles(messages, set())) else "user"
        except TemplateRefusal:
            return "user"

    def _check_options(self) -> None:
        """Raise SpecError for an option that kvaudit sets itself, and for one that changes nothing.

        Templates do not list their options, so each one is tested by leaving it out.
        """
        for name, value in self.options.items():
            if name in _RESERVED or name in self._tokens:
                raise SpecError(f"chat.{name} is set by kvaudit and the tokenizer; leave it out")
            other_options = {other: setting for other, setting in self.options.items() if other != name}
            if all(self._try_options(rows, self.options) == self._try_options(rows, other_options) for rows in _PROBES):
                raise SpecError(
                    f"chat.{name}: {json.dumps(value)} changes nothing in the chat template, which has no such option "
                    "or this default; leave it out"
                )

    def _try_options(self, rows: list[dict[str, str]], options: Mapping[str, ChatOption]) -> str:
        try:
            return renderer.render(self._source, rows, {**self._tokens, **options})
        except TemplateRefusal as error:
            return f"refused: {error}"

    def _template_stops(self) -> frozenset[int]:
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        end_of_turn = self.reply([Message(Role.USER, ".")]).ids[:1]  # the token after an answer
        stops = {token for token in end_of_turn if token in special}
        eos = self.tokenizer.eos_token_id
        return frozenset(stops if eos is None else stops | {int(eos)})

    def _render(
        self, before: tuple[Message, ...], messages: Sequence[Message], tools: Tools, marked: Sequence[Span]
    ) -> ChatTokens:
        """Return, as tokens with roles, what the template writes after the text of the messages ``before``.

        This includes the text of ``messages`` and the header of the next answer. The result also has the indices of the
        tokens of the spans ``marked`` (texts that the suite marks).
        """
        text = self._text_after(before, messages, tools)
        # unique texts in place of the messages, to tell the template's text from theirs
        slots = _with_slots(messages)
        frame = self._text_after(before, slots, tools)
        stretches = _find_stretches(text, frame, messages)
        listing, calls = list[_Stretch](), list[_Stretch]()
        if tools:
            other = self._text_after(before, slots, [TOOL_SLOT])
            listing = _find_varying(text, stretches, frame, other, Role.SYSTEM)
        if any(message.tool_calls for message in messages):
            other = self._text_after(before, slot_calls(slots), tools)
            calls = _find_varying(text, stretches, frame, other, Role.ASSISTANT)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]  # in characters of the text
        places: dict[str, list[tuple[int, int]]] = {
            name: [stretches[place.message].locate(place) for place in span_places]
            for name, span_places in find_spans(marked, [message.content for message in messages]).items()
        }
        for span in marked:
            if tools and span.text.strip() == list_tools(tools).strip():
                places.setdefault(span.name, []).extend((stretch.start, stretch.end) for stretch in listing)
        # leave out spans without tokens: a tokenizer may drop their characters
        spans = {name: tokens for name, ranges in places.items() if (tokens := _tokens(offsets, ranges))}
        roles = _roles([start for start, _ in offsets], [*stretches.values(), *listing, *calls])
        return ChatTokens(tuple(encoded["input_ids"]), roles, spans)

    def _text_after(self, before: tuple[Message, ...], messages: Sequence[Message], tools: Tools = ()) -> str:
        """Return what the template writes after ``before``: its end of turn, ``messages``, the next answer's header.

        ``before`` is empty or ends with a placeholder for an answer or a call.
        """
        text = self._template([*before, *messages], tools)
        if not before:
            return text
        # search for the last marker, since a template may repeat the assistant's text
        _, marker, rest = text.rpartition(_MARKER)
        if not marker:
            raise SpecError(
                "the chat template drops or rewrites assistant text; kvaudit cannot continue a conversation with it"
            )
        if not before[-1].tool_calls:
            return rest
        # after a call come the template's closing texts, up to the end of the turn
        ends = [index for stop in self._stop_texts if (index := rest.find(stop)) >= 0]
        if not ends:
            raise SpecError("the chat template ends no call of a tool; kvaudit cannot continue a conversation with it")
        return rest[min(ends) :]

    @cached_property
    def _stop_texts(self) -> tuple[str, ...]:
        return tuple(filter(None, map(self.tokenizer.convert_ids_to_tokens, sorted(self.stop_ids))))

    def _template(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        try:
            has_tools = bool(tools) or any(message.tool_calls for message in messages)
            return self._apply(self._rows(messages, self._arguments_as if has_tools else None), tools)
        except TemplateRefusal as error:
            roles = ", ".join(message.role for message in messages)
            raise SpecError(
                f"the chat template refuses messages of roles {roles}: {error}; take another model or suite"
            ) from None

    def _rows(self, messages: Sequence[Message], arguments_as: ArgumentsAs | None) -> list[dict[str, Any]]:
        """Return messages as the dicts that a chat template takes; those of a role that it lacks become user messages.

        ``arguments_as`` is given only for a conversation with tools: "object" or "text" is how the template takes a
        call's arguments. Tool results then keep the role ``tool``, because such a template can write them.
        """
        support = {Role.SYSTEM: self.system_role, Role.TOOL: self.tool_role}
        if arguments_as:
            has_system = any(message.role is Role.SYSTEM for message in messages)
            support = {Role.SYSTEM: self._system_with_tools if has_system else "native", Role.TOOL: "native"}
        moved = {role for role, target in support.items() if target == "user"}
        return move_roles(messages, moved, arguments_as or "object")

    def _apply(self, rows: list[dict[str, Any]], tools: Tools = ()) -> str:
        names = {**self._tokens, **self.options}
        if not tools:
            return renderer.render(self._source, rows, names)
        return renderer.render(self._tool_source, rows, {**names, "tools": list(tools)})


def move_roles(
    messages: Sequence[Message], moved: Set[Role], arguments_as: ArgumentsAs = "object"
) -> list[dict[str, Any]]:
    """Return messages as dicts for a chat template; messages of ``moved`` roles are put into user messages.

    ``arguments_as`` is how the template takes the arguments of tool calls, as an object or as text.
    """
    rows: list[dict[str, Any]] = []
    was_moved = False
    names = dict[str, str]()  # of tools, by the id of a call
    for message in messages:
        is_moved = message.role in moved
        prefix = TOOL_PREFIX if is_moved and message.role is Role.TOOL else ""
        row: dict[str, Any] = {
            "role": str(Role.USER if is_moved else message.role),
            "content": prefix + message.content,
        }
        row |= {} if is_moved else tool_fields(message, names, arguments_as)
        # two genuine user messages are never joined
        if rows and rows[-1]["role"] == row["role"] == Role.USER and (is_moved or was_moved):
            rows[-1]["content"] += "\n\n" + row["content"]
        else:
            rows.append(row)
        was_moved = is_moved
    return rows


def _template_of(tokenizer: Any, tools: Tools | None = None) -> str:
    try:
        return str(tokenizer.get_chat_template(tools=tools))
    except ValueError as error:  # several named templates, none of them the default
        raise SpecError(f"the tokenizer's chat template cannot be chosen: {str(error).partition('.')[0]}") from None


class _Stretch(NamedTuple):
    """The part of the rendered text, from ``start`` to ``end``, that a message's text takes up.

    ``offsets`` are the positions of the message's characters relative to ``start``, negative for characters that
    were stripped at the beginning; None if the message is written unchanged.
    """

    start: int
    end: int
    role: str
    offsets: Sequence[int] | None = None

    def locate(self, place: Place) -> tuple[int, int]:
        """Return the start and end, in the rendered text, of ``place``: a range of characters of the message."""
        ends = (place.start, place.end)
        start, end = (self.start + (n if self.offsets is None else self.offsets[n]) for n in ends)
        return max(start, self.start), min(end, self.end)


def _has_slot(message: Message) -> bool:
    return bool(message.content) or not message.tool_calls


def _with_slots(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each text replaced by a unique placeholder."""
    return [
        replace(message, content=_SLOT.format(n)) if _has_slot(message) else message
        for n, message in enumerate(messages)
    ]


def _find_varying(text: str, texts: Mapping[int, _Stretch], frame: str, other: str, role: Role) -> list[_Stretch]:
    """Return the parts of the prompt ``text``, between its messages, where the template wrote tools or calls.

    ``frame`` is a rendering with the same tools and calls as ``text``, ``other`` one with different tools or calls; the
    parts are where these two differ. ``texts`` maps each message's number to the part of ``text`` that the message
    takes up, in the order of the text. The returned parts get the role ``role``.
    """
    starts = [0, *(stretch.end for stretch in texts.values())]
    ends = [*(stretch.start for stretch in texts.values()), len(text)]
    stretches = []
    for start, end, header, variant in zip(starts, ends, _between(frame, texts), _between(other, texts), strict=True):
        if header != variant:
            begin, stop = differing_part(text[start:end], variant)
            stretches.append(_Stretch(start + begin, start + stop, str(role)))
    return stretches


def _between(frame: str, numbers: Iterable[int]) -> list[str]:
    """Return the template's own text before each placeholder message in ``frame``, and after the last one.

    ``numbers`` are the messages' numbers, in the order of the text.
    """
    headers = []
    for number in numbers:
        header, _, frame = frame.partition(_SLOT.format(number))
        headers.append(header)
    return [*headers, frame]


def _roles(starts: Sequence[int], stretches: Iterable[_Stretch]) -> tuple[str, ...]:
    """Return the role of every token: that of the stretch in which the token starts, or "format" outside of all.

    ``starts`` has the position of each token's first character in the rendered text.
    """
    ordered = sorted(stretches, key=lambda stretch: (stretch.start, stretch.end))
    roles, n = [], 0
    for start in starts:
        while n < len(ordered) and ordered[n].end <= start:
            n += 1
        inside = n < len(ordered) and ordered[n].start <= start
        roles.append(ordered[n].role if inside else FORMAT_ROLE)
    return tuple(roles)


def _tokens(offsets: Sequence[tuple[int, int]], places: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the indices of the tokens that hold at least one character of the ranges ``places``.

    ``offsets`` has the range of characters of each token.
    """
    return tuple(
        number
        for number, (start, end) in enumerate(offsets)
        if any(max(start, first) < min(end, last) for first, last in places)
    )


def _find_stretches(text: str, frame: str, messages: Sequence[Message]) -> dict[int, _Stretch]:
    """Return the part of the rendered ``text`` that each message takes up; templates may strip a text or write JSON.

    ``frame`` is the same conversation with a placeholder for each text. It distinguishes a short text from the same
    letters in a header, and shows the order in which the template writes the messages. Messages without text, which
    have only calls, are left out.
    """
    stretches, position = dict[int, _Stretch](), 0
    numbers = [number for number, message in enumerate(messages) if _has_slot(message)]
    for number in sorted(numbers, key=lambda number: frame.find(_SLOT.format(number))):
        message = messages[number]
        # the template text before this message, and the frame after its slot
        header, _, frame = frame.partition(_SLOT.format(number))
        # a header that depends on the text differs from the frame's; then search for the text alone
        if text.startswith(header, position):
            position += len(header)
        form, offsets = _find_form(text, position, message.content)
        start = text.find(form, position)
        if start < 0:
            raise SpecError(f"the chat template rewrites {message.role} text; kvaudit cannot tell its tokens apart")
        position = start + len(form)
        stretches[number] = _Stretch(start, position, str(message.role), offsets)
    return stretches


def _find_form(text: str, position: int, content: str) -> tuple[str, Sequence[int] | None]:
    """Return the form of a message's text at ``position`` of the rendered ``text``, and its characters' offsets there.

    The template may write ``content`` unchanged (offsets None), stripped or as JSON. Offsets are as in ``_Stretch``.
    """
    if text.startswith(content, position):
        return content, None
    removed, stripped = len(content) - len(content.lstrip()), content.strip()
    as_stripped = stripped, range(-removed, len(content) - removed + 1)
    if text.startswith(stripped, position):
        return as_stripped
    widths = [len(_escape_json(letter)) for letter in content]
    forms = (
        as_stripped,
        (_escape_json(content), list(accumulate(widths, initial=0))),
        (_escape_json(stripped), list(accumulate(widths, initial=-sum(widths[:removed])))),
    )
    exact = next((form for form in forms if text.startswith(form[0], position)), None)
    return exact or next((form for form in forms if text.find(form[0], position) >= 0), as_stripped)


def _escape_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
