"""Render conversations as tokens with any chat template, turn by turn, with the role of every token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from kvaudit.audit.sampling.rendering import TemplateRefusal, renderer, unstable_names
from kvaudit.core.completions import THOUGHT_CLOSING, THOUGHT_OPENING
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Message, Role, message_rows
from kvaudit.core.spans import Place, Span, find_spans

FORMAT_ROLE = "format"  # tokens of the template itself: headers, end-of-turn, generation prompt
TOOL_PREFIX = "Tool result:\n"
_MARKER = "kvaudit-marker-7391"  # takes the place of an answer, to find it in the rendered text
_TORN, _MOST_BYTES = "\ufffd", 4  # decoded form of an incomplete character; bytes of the longest character
_SHORT, _MOST_COUNTS = 2_000, 20_000  # token counts are cached for texts up to so many characters, up to so many
_SLOT = "kvaudit-slot-{}-7391"
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
    """Token ids with one role name per token: system, user, assistant, tool, or format.

    ``spans`` has, by the name of a marked span, the numbers of the tokens that hold a character of it.
    """

    ids: tuple[int, ...]
    roles: tuple[str, ...]
    spans: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.roles)

    def drop(self, count: int) -> ChatTokens:
        """Return the rendering without its first ``count`` tokens."""
        spans = {name: tuple(n - count for n in numbers if n >= count) for name, numbers in self.spans.items()}
        return ChatTokens(self.ids[count:], self.roles[count:], spans)


class Chat:
    """A fast tokenizer and its chat template, which render the first prompt and the replies after each answer.

    ``tool_role`` and ``system_role``: "native" if the template accepts that role, "user" if its text is put into a user
    message. ``opens_thought``: the template begins every answer with the opening of a thought. ``stop_ids``: all
    tokens that end an assistant turn. ``options`` are passed to the template by name.
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
        self.options = dict(options or {})
        self._check_options()
        self.system_role: Literal["native", "user"] = self._takes(Role.SYSTEM, first=True)
        self.tool_role: Literal["native", "user"] = self._takes(Role.TOOL, first=False)
        self.opens_thought = self._template([Message(Role.USER, ".")]).rstrip().endswith(THOUGHT_OPENING)
        self.stop_ids: frozenset[int] = frozenset(stop_ids) | self._template_stops()

    def prompt(self, messages: Sequence[Message], spans: Sequence[Span] = ()) -> ChatTokens:
        """Return the prompt, generation prompt included, with the tokens of the marked ``spans``."""
        return self._render((), messages, spans)

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """Return the prompt as text, generation prompt included."""
        return self._text_after((), messages)

    @property
    def unstable_names(self) -> list[str]:
        """The names in the template that may make its output differ from day to day."""
        return unstable_names(self._source)

    def reply(self, messages: Sequence[Message], spans: Sequence[Span] = ()) -> ChatTokens:
        """Return the tokens after an assistant completion: end-of-turn, the new messages, generation prompt.

        They are cut from a conversation with a marker as the answer, so this works with any template. A completion that
        ends with a sampled end-of-turn token already holds the first one: see ``continuation``.
        """
        # begin with a user: many templates refuse a conversation that begins with the assistant
        return self._render((Message(Role.USER, "."), Message(Role.ASSISTANT, _MARKER)), messages, spans)

    def continuation(
        self, completion: Sequence[int], messages: Sequence[Message], spans: Sequence[Span] = ()
    ) -> ChatTokens:
        """Return ``reply`` without the end-of-turn token that ``completion`` already ends with."""
        rendered = self.reply(messages, spans)
        if completion and completion[-1] in self.stop_ids:
            # search only before the next message's text, which may hold the same token
            lead = next((i for i, role in enumerate(rendered.roles) if role != FORMAT_ROLE), len(rendered.ids))
            if completion[-1] in rendered.ids[:lead]:
                return rendered.drop(rendered.ids.index(completion[-1]) + 1)
        return rendered

    @property
    def end_of_turn(self) -> int:
        """The token that ends an answer; raises SpecError if the template has none."""
        # the template's ending comes first: the tokenizer's eos may end a text and not a turn
        candidates = [*self.reply([Message(Role.USER, ".")]).ids[:1], self.tokenizer.eos_token_id]
        token = next((token for token in candidates if token in self.stop_ids), None)
        if token is None:
            raise SpecError("the chat template has no token that ends an answer; use an instruct model")
        return int(token)

    def text(self, ids: Sequence[int]) -> str:
        """Return a completion as text without a final stop token; other special tokens stay visible."""
        kept = list(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)
        decoded: str = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return decoded

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds, for display; a character of several tokens goes to the last of them."""
        texts: list[str] = []
        before: list[int] = []
        pending: list[int] = []
        for number, token in enumerate(ids, 1):
            pending.append(token)
            # decode with the tokens before, since some tokenizers drop a space at the beginning of a text
            shown, text = (
                self.tokenizer.decode(tokens, skip_special_tokens=False) for tokens in (before, [*before, *pending])
            )
            # an incomplete character waits for the next token; not for ever, since U+FFFD may be in the text itself
            if text.endswith(_TORN) and len(pending) < _MOST_BYTES and number < len(ids):
                texts.append("")
                continue
            texts.append(text[len(shown) :])
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
        """Return what a run records of its chat template: its options, and how it takes system and tool roles."""
        return {"options": self.options, "system_role": self.system_role, "tool_role": self.tool_role}

    def role_notes(self) -> list[str]:
        """Return a sentence for each role that the template does not accept."""
        roles = (("system", self.system_role, "system prompts"), ("tool", self.tool_role, "tool results"))
        text = "the template takes no {} role: {} stand in the user's message"
        return [text.format(role, texts) for role, taken, texts in roles if taken == "user"]

    def _takes(self, role: Role, *, first: bool) -> Literal["native", "user"]:
        plain = [Message(Role.USER, "."), Message(Role.ASSISTANT, ".")]
        probe = Message(role, _MARKER)
        # in its usual place, or the template would refuse the order instead of the role
        messages = [probe, *plain[:1]] if first else [*plain, probe]
        try:
            return "native" if _MARKER in self._apply(message_rows(messages)) else "user"
        except TemplateRefusal:
            return "user"

    def _check_options(self) -> None:
        """Raise SpecError for an option that kvaudit sets, and for one that changes nothing.

        Templates do not list their options, so each one is tested by leaving it out.
        """
        for name, value in self.options.items():
            if name in _RESERVED or name in self._tokens:
                raise SpecError(f"chat.{name} is set by kvaudit and the tokenizer; leave it out")
            others = {other: setting for other, setting in self.options.items() if other != name}
            if all(self._try_options(rows, self.options) == self._try_options(rows, others) for rows in _PROBES):
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

    def _render(self, before: tuple[Message, ...], messages: Sequence[Message], marked: Sequence[Span]) -> ChatTokens:
        """Return the tokens of the messages and of the template text around them, after the messages ``before``."""
        text = self._text_after(before, messages)
        # unique texts in place of the messages, to tell the template's text from theirs
        slots = [replace(message, content=_SLOT.format(n)) for n, message in enumerate(messages)]
        stretches = _stretches(text, self._text_after(before, slots), messages)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        roles, n = [], 0  # a role for every token; the number of the current message
        for start, _ in encoded["offset_mapping"]:  # in characters of the text
            while n < len(stretches) and stretches[n].end <= start:
                n += 1
            # a token belongs to the message that it begins in
            inside = n < len(stretches) and stretches[n].start <= start
            roles.append(stretches[n].role if inside else FORMAT_ROLE)
        spans = {
            name: _tokens(encoded["offset_mapping"], [stretches[place.message].locate(place) for place in places])
            for name, places in find_spans(marked, [message.content for message in messages]).items()
        }
        # leave out spans without tokens: a tokenizer may drop their characters
        spans = {name: tokens for name, tokens in spans.items() if tokens}
        return ChatTokens(tuple(encoded["input_ids"]), tuple(roles), spans)

    def _text_after(self, before: tuple[Message, ...], messages: Sequence[Message]) -> str:
        text = self._template([*before, *messages])
        if not before:
            return text
        # the last marker, since a template may repeat the assistant's text
        _, marker, after = text.rpartition(_MARKER)
        if not marker:
            raise SpecError(
                "the chat template drops or rewrites assistant text; kvaudit cannot continue a conversation with it"
            )
        return after

    def _template(self, messages: Sequence[Message]) -> str:
        try:
            taken = {Role.SYSTEM: self.system_role, Role.TOOL: self.tool_role}
            moved = {role for role, way in taken.items() if way == "user"}
            return self._apply(move_roles(messages, moved))
        except TemplateRefusal as error:
            roles = ", ".join(message.role for message in messages)
            raise SpecError(
                f"the chat template refuses messages of roles {roles}: {error}; take another model or suite"
            ) from None

    def _apply(self, rows: list[dict[str, str]]) -> str:
        return renderer.render(self._source, rows, {**self._tokens, **self.options})


def move_roles(messages: Sequence[Message], moved: Set[Role]) -> list[dict[str, str]]:
    """Return messages as rows; those of ``moved`` roles become user text, joined to a neighbouring user row."""
    rows: list[dict[str, str]] = []
    was_moved = False
    for message in messages:
        is_moved = message.role in moved
        prefix = TOOL_PREFIX if is_moved and message.role is Role.TOOL else ""
        row = {"role": str(Role.USER if is_moved else message.role), "content": prefix + message.content}
        # two genuine user messages are never joined
        if rows and rows[-1]["role"] == row["role"] == Role.USER and (is_moved or was_moved):
            rows[-1]["content"] += "\n\n" + row["content"]
        else:
            rows.append(row)
        was_moved = is_moved
    return rows


def _template_of(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:  # several named templates, none of them the default
        raise SpecError(f"the tokenizer's chat template cannot be chosen: {str(error).partition('.')[0]}") from None


class _Stretch(NamedTuple):
    """Where a message's text is in the rendered text; ``lost``: leading characters that the template stripped."""

    start: int
    end: int
    role: str
    lost: int

    def locate(self, place: Place) -> tuple[int, int]:
        """Return where a place in the message is in the rendered text."""
        first, last = (self.start - self.lost + offset for offset in (place.start, place.end))
        return max(first, self.start), min(last, self.end)


def _tokens(offsets: Sequence[tuple[int, int]], places: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the numbers of the tokens that hold at least one character of the places."""
    return tuple(
        number
        for number, (start, end) in enumerate(offsets)
        if any(max(start, first) < min(end, last) for first, last in places)
    )


def _stretches(text: str, frame: str, messages: Sequence[Message]) -> list[_Stretch]:
    """Locate each message's text in the rendered text, in order; templates may strip it but not change it.

    ``frame`` is the same conversation with slots for texts: it tells a short text from the same letters in a header.
    """
    stretches, position = [], 0
    for number, message in enumerate(messages):
        # the template text before this message, and the frame after its slot
        header, _, frame = frame.partition(_SLOT.format(number))
        # a header that depends on the text differs from the frame's; then only the text is searched for
        if text.startswith(header, position):
            position += len(header)
        content = message.content if text.startswith(message.content, position) else message.content.strip()
        start = text.find(content, position)
        if start < 0:
            raise SpecError(f"the chat template rewrites {message.role} text; kvaudit cannot tell its tokens apart")
        position = start + len(content)
        # places in the message shift by the leading characters that were stripped
        lost = 0 if content == message.content else len(message.content) - len(message.content.lstrip())
        stretches.append(_Stretch(start, position, str(message.role), lost))
    return stretches
