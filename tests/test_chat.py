"""Chat templates: the same conversation, turn by turn or whole, has the same tokens."""

from __future__ import annotations

import pytest
from conftest import CHATML, byte_tokenizer

from kvaudit.audit.sampling.chat import Chat
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Message, Role

SYSTEM = Message(Role.SYSTEM, "Never say zebra.")
USER = Message(Role.USER, "  Hé 你好? ")
TOOL = Message(Role.TOOL, '{"mails": 2}')

# Takes only user and assistant, in strict alternation, as several public templates do.
STRICT = (
    "{{ '<s>' }}{% for m in messages %}"
    "{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('only user and assistant') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{{ '[' + m['role'] + ']' + m['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def spoken(chat: Chat, role: str, rendered: object) -> str:
    ids = [i for i, r in zip(rendered.ids, rendered.roles, strict=True) if r == role]
    return chat.tokenizer.decode(ids)


def test_opening_is_the_template_and_names_the_role_of_every_token() -> None:
    chat = Chat(byte_tokenizer())
    opening = chat.prompt([SYSTEM, USER])
    text = chat.tokenizer.decode(opening.ids)
    assert text == (
        "<|im_start|>system\nNever say zebra.<|im_end|>\n"
        "<|im_start|>user\n  Hé 你好? <|im_end|>\n<|im_start|>assistant\n"
    )
    assert spoken(chat, "system", opening) == "Never say zebra."
    assert spoken(chat, "user", opening) == "  Hé 你好? "
    assert set(opening.roles) == {"system", "user", "format"}


@pytest.mark.parametrize("template", [CHATML, STRICT])
def test_opening_completion_and_continuation_join_to_the_whole_conversation(template: str) -> None:
    chat = Chat(byte_tokenizer(template))
    completion = (*chat.tokenizer("Yes.", add_special_tokens=False)["input_ids"], chat.tokenizer.eos_token_id)
    joined = chat.prompt([SYSTEM, USER]).ids + completion + chat.continuation(completion, [TOOL]).ids
    whole = chat.prompt([SYSTEM, USER, Message(Role.ASSISTANT, "Yes."), TOOL])
    assert joined == whole.ids


def test_a_short_text_is_not_mistaken_for_the_same_letters_in_a_header() -> None:
    opening = Chat(byte_tokenizer()).prompt([Message(Role.SYSTEM, "s"), Message(Role.USER, "user")])
    assert [(r, opening.roles.count(r)) for r in ("system", "user")] == [("system", 1), ("user", 4)]
    assert opening.roles[len("_system\n")] == "system"  # one token for the header's mark, one per letter


def test_a_completion_cut_by_length_is_closed_by_the_reply() -> None:
    chat = Chat(byte_tokenizer())
    completion = tuple(chat.tokenizer("Yes", add_special_tokens=False)["input_ids"])
    assert chat.continuation(completion, [TOOL]) == chat.reply([TOOL])
    assert chat.reply([TOOL]).ids[0] == chat.tokenizer.eos_token_id
    assert spoken(chat, "tool", chat.reply([TOOL])) == '{"mails": 2}'


def test_a_template_without_tool_and_system_roles_gets_them_as_user_text() -> None:
    chat = Chat(byte_tokenizer(STRICT))
    assert (chat.tool_role, chat.system_role) == ("user", "user")
    opening = chat.prompt([SYSTEM, USER])
    assert chat.tokenizer.decode(opening.ids) == "<s>[user]Never say zebra.\n\n  Hé 你好?<|im_end|>[assistant]"
    assert spoken(chat, "system", opening) == "Never say zebra."
    reply = chat.reply([TOOL, TOOL])
    assert chat.tokenizer.decode(reply.ids).count("Tool result:\n") == 2
    assert spoken(chat, "tool", reply) == '{"mails": 2}' * 2


def test_a_template_with_all_roles_keeps_them() -> None:
    chat = Chat(byte_tokenizer())
    assert (chat.tool_role, chat.system_role) == ("native", "native")


def test_a_template_that_drops_a_role_silently_gets_it_as_user_text() -> None:
    dropping = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'tool' %}")
    assert Chat(byte_tokenizer(dropping)).tool_role == "user"


def test_text_drops_one_final_stop_token_and_keeps_other_special_tokens() -> None:
    chat = Chat(byte_tokenizer())
    stop = chat.tokenizer.eos_token_id
    ids = chat.tokenizer("Hé<|im_start|>", add_special_tokens=False)["input_ids"]
    assert chat.text((*ids, stop)) == "Hé<|im_start|>"
    assert chat.text((*ids, stop, stop)) == "Hé<|im_start|><|im_end|>"
    assert chat.text(()) == ""


def test_count_tokens_counts_bytes_of_a_byte_tokenizer() -> None:
    assert Chat(byte_tokenizer()).count_tokens("Hé!") == 4


def test_stop_tokens_are_the_end_of_turn_and_what_the_model_adds() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|pad|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert Chat(tokenizer, [7]).stop_ids == {7, end, tokenizer.convert_tokens_to_ids("<|pad|>")}


def test_texts_that_a_template_leaves_out_take_no_tokens() -> None:
    """An empty text and one of spaces, of one role, at one place of the rendered text."""
    template = (
        "{% for m in messages if m['content'] | trim %}{{ '[' + m['role'] + ']' + m['content'] + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
    )
    chat = Chat(byte_tokenizer(template))
    turns = [USER, Message(Role.ASSISTANT, "Yes.")]
    expected = chat.prompt(turns)
    found = chat.prompt([*turns, Message(Role.TOOL, ""), Message(Role.TOOL, " ")])
    assert (found.ids, found.roles) == (expected.ids, expected.roles)


def test_no_chat_template_is_a_spec_error() -> None:
    with pytest.raises(SpecError, match="no chat template"):
        Chat(byte_tokenizer(None))


def test_a_template_that_rewrites_text_is_a_spec_error() -> None:
    chat = Chat(byte_tokenizer(CHATML.replace("m['content']", "(m['content'] | replace('Hé', 'He'))")))
    with pytest.raises(SpecError, match="rewrites user text"):
        chat.prompt([USER])


def test_a_conversation_the_template_refuses_is_a_spec_error() -> None:
    with pytest.raises(SpecError, match=r"refuses messages of roles user, user: must alternate"):
        Chat(byte_tokenizer(STRICT)).prompt([USER, USER])
