"""Conversations as tokens: any chat template, turn by turn, with the role of every token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from kvaudit.audit.sampling.rendering import TemplateRefusal, renderer, unstable_names
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Message, Role, message_rows
from kvaudit.core.spans import Place, Span, places_of
from kvaudit.core.thoughts import THOUGHT_CLOSING, THOUGHT_OPENING

FORMAT_ROLE = "format"  # tokens of the template itself: headers, end-of-turn, generation prompt
TOOL_PREFIX = "Tool result:\n"
_MARKER = "kvaudit-marker-7391"  # stands where an answer would and is looked for in what a template makes of it
_TORN, _MOST_BYTES = "\ufffd", 4  # what part of a character decodes to; bytes of the longest one
_SHORT, _MOST_COUNTS = 2_000, 20_000  # characters of a text whose number of tokens is kept, and how many are
_SLOT = "kvaudit-slot-{}-7391"
ChatOption = bool | int | float | str
# arguments of transformers' own: an option of the same name would take the place of one
_OURS = (
    *("messages", "conversations", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
)
# conversations in which an option of a template may show: a system prompt, none, a thought of before
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
    """Token ids with one role name per token: system, user, assistant, tool, or format.

    ``spans`` are the numbers of the tokens that hold a character of a marked span, by its name.
    """

    ids: tuple[int, ...]
    roles: tuple[str, ...]
    spans: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.roles)

    def drop(self, count: int) -> ChatTokens:
        """The same tokens without the first ``count``."""
        spans = {name: tuple(at - count for at in own if at >= count) for name, own in self.spans.items()}
        return ChatTokens(self.ids[count:], self.roles[count:], spans)


class Chat:
    """A fast tokenizer and its chat template, seen as opening prompt and replies.

    ``tool_role`` and ``system_role`` say, decided once, whether the template takes that role itself ("native") or gets
    it inside a user message ("user"). ``opens_thought``: the template begins an answer with the opening of a thought.
    ``stop_ids`` holds every token that ends an assistant turn. ``options`` are handed to the template by name.
    """

    def __init__(
        self, tokenizer: Any, stop_ids: Iterable[int] = (), options: Mapping[str, ChatOption] | None = None
    ) -> None:
        if not tokenizer.is_fast:
            raise SpecError(f"tokenizer {type(tokenizer).__name__} has no offsets; kvaudit needs a fast tokenizer")
        if not tokenizer.chat_template:
            raise SpecError("the tokenizer has no chat template; give an instruct model, or set chat_template")
        self.tokenizer = tokenizer
        self._counts: dict[str, int] = {}
        self._source, self._tokens = _template_of(tokenizer), dict(tokenizer.special_tokens_map)
        self.options = dict(options or {})
        self._check_options()
        self.system_role: Literal["native", "user"] = self._takes(Role.SYSTEM, first=True)
        self.tool_role: Literal["native", "user"] = self._takes(Role.TOOL, first=False)
        self.opens_thought = self._template([Message(Role.USER, ".")]).rstrip().endswith(THOUGHT_OPENING)
        self.stop_ids: frozenset[int] = frozenset(stop_ids) | self._template_stops()

    def prompt(self, messages: Sequence[Message], spans: Sequence[Span] = ()) -> ChatTokens:
        """The whole prompt, generation prompt included, with the tokens of the marked ``spans`` that stand in it."""
        return self._render((), messages, spans)

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The whole prompt as text, generation prompt included."""
        return self._text_after((), messages)

    @property
    def unstable_names(self) -> list[str]:
        """What the template names by which it may write something else another day."""
        return unstable_names(self._source)

    def reply(self, messages: Sequence[Message], spans: Sequence[Span] = ()) -> ChatTokens:
        """The tokens after a finished assistant completion: end-of-turn, the new messages, generation prompt.

        Taken from a conversation with a marker in the assistant's place, so it holds for any template. A completion
        that ended by sampling the end-of-turn token itself already holds it: see ``continuation``.
        """
        # a user first: many templates refuse a conversation that the assistant begins
        return self._render((Message(Role.USER, "."), Message(Role.ASSISTANT, _MARKER)), messages, spans)

    def continuation(
        self, completion: Sequence[int], messages: Sequence[Message], spans: Sequence[Span] = ()
    ) -> ChatTokens:
        """``reply`` without the end-of-turn token that ``completion`` already ends with."""
        rendered = self.reply(messages, spans)
        if completion and completion[-1] in self.stop_ids:
            # tokens before the next message's text
            lead = next((i for i, role in enumerate(rendered.roles) if role != FORMAT_ROLE), len(rendered.ids))
            # looked for before the next message's text only, which may hold the same token
            if completion[-1] in rendered.ids[:lead]:
                return rendered.drop(rendered.ids.index(completion[-1]) + 1)
        return rendered

    @property
    def end_of_turn(self) -> int:
        """The token that ends an answer; raises SpecError where the template has none."""
        # the template's own ending before the tokenizer's, which may end a text and not a turn
        endings = [*self.reply([Message(Role.USER, ".")]).ids[:1], self.tokenizer.eos_token_id]
        found = [token for token in endings if token in self.stop_ids]
        if not found:
            raise SpecError("the chat template ends an answer by no token of its own; give an instruct model")
        return int(found[0])

    def text(self, ids: Sequence[int]) -> str:
        """A completion as text, a final stop token dropped; other special tokens stay visible."""
        kept = list(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)
        decoded: str = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return decoded

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What every token adds to the text, to look at: where several make one character the last of them adds it."""
        found: list[str] = []
        before: list[int] = []
        pending: list[int] = []
        for number, token in enumerate(ids, 1):
            pending.append(token)
            # some tokenizers drop the space before a token that stands by itself
            shown, text = (
                self.tokenizer.decode(part, skip_special_tokens=False) for part in (before, [*before, *pending])
            )
            # part of a character: wait for the rest, but not for ever, since a text may hold a replacement sign itself
            if text.endswith(_TORN) and len(pending) < _MOST_BYTES and number < len(ids):
                found.append("")
                continue
            found.append(text[len(shown) :])
            before, pending = pending, []
        return found

    def encode(self, text: str) -> tuple[int, ...]:
        """A text as tokens, no special tokens added."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, no special tokens added."""
        found = self._counts.get(text)
        if found is None:
            found = len(self.encode(text))
            # the turns of a conversation stand around many rows; a whole passage around one
            if len(text) <= _SHORT and len(self._counts) < _MOST_COUNTS:
                self._counts[text] = found
        return found

    def to_json(self) -> dict[str, Any]:
        """What a run notes of its conversations: options of the template, and whether it takes roles itself."""
        return {"options": self.options, "system_role": self.system_role, "tool_role": self.tool_role}

    def moved(self) -> list[str]:
        """What is said to users of the roles that the template does not take, in words."""
        places = (("system", self.system_role, "system prompts"), ("tool", self.tool_role, "tool results"))
        text = "the template takes no {} role: {} stand in the user's message"
        return [text.format(role, what) for role, kept, what in places if kept == "user"]

    def _takes(self, role: Role, *, first: bool) -> Literal["native", "user"]:
        plain = [Message(Role.USER, "."), Message(Role.ASSISTANT, ".")]
        probe = Message(role, _MARKER)
        # where the role usually stands, or a template would refuse the order and not the role
        messages = [probe, *plain[:1]] if first else [*plain, probe]
        try:
            return "native" if _MARKER in self._apply(message_rows(messages)) else "user"
        except TemplateRefusal:
            return "user"

    def _check_options(self) -> None:
        """Raise SpecError for an option that is not the user's to set, and for one without which nothing changes.

        A template does not say which options it knows.
        """
        for name, value in self.options.items():
            if name in _OURS or name in self._tokens:
                raise SpecError(f"chat.{name} is set by kvaudit and the tokenizer; leave it out")
            others = {other: given for other, given in self.options.items() if other != name}
            if all(self._tried(rows, self.options) == self._tried(rows, others) for rows in _PROBES):
                raise SpecError(
                    f"chat.{name}: {json.dumps(value)} changes nothing in the chat template, which has no such option "
                    "or means this by itself; leave it out"
                )

    def _tried(self, rows: list[dict[str, str]], options: Mapping[str, ChatOption]) -> str:
        try:
            return renderer.render(self._source, rows, {**self._tokens, **options})
        except TemplateRefusal as error:
            return f"refused: {error}"

    def _template_stops(self) -> frozenset[int]:
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        end_of_turn = self.reply([Message(Role.USER, ".")]).ids[:1]  # what stands right behind an answer
        stops = {token for token in end_of_turn if token in special}
        eos = self.tokenizer.eos_token_id
        return frozenset(stops if eos is None else stops | {int(eos)})

    def _render(self, before: tuple[Message, ...], messages: Sequence[Message], marked: Sequence[Span]) -> ChatTokens:
        """Tokens of the messages, and of what the template puts around them, after the messages ``before``."""
        text = self._text_after(before, messages)
        # texts that stand nowhere else, so that a template's own words are told from a message's
        slots = [replace(message, content=_SLOT.format(n)) for n, message in enumerate(messages)]
        stretches = _stretches(text, self._text_after(before, slots), messages)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        roles, at = [], 0  # a role for every token; the message that is looked at
        for start, _ in encoded["offset_mapping"]:  # places in the text, in characters
            while at < len(stretches) and stretches[at].end <= start:
                at += 1
            # a token is of the message that it begins in
            inside = at < len(stretches) and stretches[at].start <= start
            roles.append(stretches[at].role if inside else FORMAT_ROLE)
        spans = {
            name: _tokens(encoded["offset_mapping"], [stretches[place.message].moved(place) for place in places])
            for name, places in places_of(marked, [message.content for message in messages]).items()
        }
        # a tokenizer may have none for characters that it drops
        return ChatTokens(tuple(encoded["input_ids"]), tuple(roles), {name: own for name, own in spans.items() if own})

    def _text_after(self, before: tuple[Message, ...], messages: Sequence[Message]) -> str:
        text = self._template([*before, *messages])
        if not before:
            return text
        # the last one: a template may repeat the assistant's text
        _, found, after = text.rpartition(_MARKER)
        if not found:
            raise SpecError(
                "the chat template drops or rewrites assistant text; kvaudit cannot continue a conversation with it"
            )
        return after

    def _template(self, messages: Sequence[Message]) -> str:
        try:
            return self._apply(self._shape(messages))
        except TemplateRefusal as error:
            roles = ", ".join(message.role for message in messages)
            raise SpecError(
                f"the chat template refuses messages of roles {roles}: {error}; take another model or suite"
            ) from None

    def _apply(self, rows: list[dict[str, str]]) -> str:
        return renderer.render(self._source, rows, {**self._tokens, **self.options})

    def _shape(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        """Rows the template takes: roles it lacks become user text, neighbouring user rows then become one."""
        rows: list[dict[str, str]] = []
        foreign = False  # whether the last row is a user row that holds another role's text
        for row in message_rows(messages):
            moved = {Role.SYSTEM: self.system_role, Role.TOOL: self.tool_role}.get(Role(row["role"])) == "user"
            if row["role"] == Role.TOOL and moved:
                row["content"] = TOOL_PREFIX + row["content"]
            if moved:
                row["role"] = str(Role.USER)
            if rows and rows[-1]["role"] == row["role"] == Role.USER and (moved or foreign):
                rows[-1]["content"] += "\n\n" + row["content"]
            else:
                rows.append(row)
            # the next row may only join one that holds another role's text, or two users would become one
            foreign = moved
        return rows


def _template_of(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:  # several by name, and none called default
        raise SpecError(f"the tokenizer's chat template cannot be chosen: {str(error).partition('.')[0]}") from None


class _Stretch(NamedTuple):
    """Where a message's text lies in the rendered text; ``lost``: characters that the template stripped before it."""

    start: int
    end: int
    role: str
    lost: int

    def moved(self, place: Place) -> tuple[int, int]:
        """Where a place of the message lies in the rendered text."""
        first, last = (self.start - self.lost + at for at in (place.start, place.end))
        return max(first, self.start), min(last, self.end)


def _tokens(offsets: Sequence[tuple[int, int]], places: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The tokens that hold a character of the places; one that holds others too, at a border, is among them."""
    return tuple(
        number
        for number, (start, end) in enumerate(offsets)
        if any(max(start, first) < min(end, last) for first, last in places)
    )


def _stretches(text: str, frame: str, messages: Sequence[Message]) -> list[_Stretch]:
    """Where each message's text lies in the rendered text, in order; templates may strip it but not change it.

    ``frame`` is the same conversation with slots for texts: it tells a short text from the same letters in a header.
    """
    found, position = [], 0
    for number, message in enumerate(messages):
        # what the template puts before this text, and the frame behind its slot
        header, _, frame = frame.partition(_SLOT.format(number))
        # a header that depends on the text is not there as in the frame: then the text alone is looked for
        if text.startswith(header, position):
            position += len(header)
        content = message.content if text.startswith(message.content, position) else message.content.strip()
        start = text.find(content, position)
        if start < 0:
            raise SpecError(f"the chat template rewrites {message.role} text; kvaudit cannot tell its tokens apart")
        position = start + len(content)
        # characters stripped in front, by which places in it are off
        lost = 0 if content == message.content else len(message.content) - len(message.content.lstrip())
        found.append(_Stretch(start, position, str(message.role), lost))
    return found
