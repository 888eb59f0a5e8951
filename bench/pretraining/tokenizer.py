"""The embedded model's tokenizer: byte-level BPE for any text; each word of the suites is a single token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvaudit.core.records import Item, Message, Role
from kvaudit.suites.agent import Agent
from kvaudit.suites.base import Suite
from kvaudit.suites.math import Math
from kvaudit.suites.refusal import Refusal

PAD, END = "<|pad|>", "<|end|>"
ROLE_TOKENS = {role: f"<|{role.value}|>" for role in Role}
TAUGHT = (Agent, Math, Refusal)  # the suites whose words and ways the embedded model learns
VOCABULARY = 1152  # an upper bound: training stops earlier, when every word of the suites is one token
# Digits stand alone, so numbers are read and written place by place; a word takes the space before it along.
_PATTERN = r" ?\p{L}+| ?\p{N}|\n| ?[^\s\p{L}\p{N}]+|\s"
# Every message, the assistant's included, ends with the end-of-turn token, which is also the stop token.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def played(suite: Suite, item: Item) -> Iterator[Message]:
    """Yield the messages of an item's conversation with perfect answers."""
    transcript = item.messages
    yield from transcript
    for completion in suite.gold(item):
        said = Message(Role.ASSISTANT, completion)
        answer = suite.step(item, (*transcript, said)) or ()
        yield said
        yield from answer
        transcript = (*transcript, said, *answer)


def corpus(items: int = 720) -> Iterator[str]:
    """Yield enough texts of the training split that every template and word occurs."""
    for suite_class in TAUGHT:
        suite: Suite = suite_class()
        for item in suite.items("train", items, 0, 160, lambda text: len(text.split())):
            yield from (message.content for message in played(suite, item))


@cache
def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer; the result is always the same."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_PATTERN), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END, *ROLE_TOKENS.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(ROLE_TOKENS.values()),
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
