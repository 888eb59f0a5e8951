"""``kvaudit`` as a model of lm-evaluation-harness: answers, and log-probs of continuations, with a compressed cache.

Continuations are scored token by token, as they would be sampled, never in one prefill.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from kvaudit import __version__
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.sampling.chat import ChatTokens
from kvaudit.audit.sampling.checkpoints import load_model_or_adapter
from kvaudit.audit.sampling.conversations import holds_stop, score_answers
from kvaudit.audit.sampling.decoding import Completion, Decoding
from kvaudit.audit.sampling.model import EMBEDDED
from kvaudit.audit.sampling.packing import pack_weights
from kvaudit.audit.sampling.sampler import AnyEpisode, ContinuousBatch, Sampler
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Message, Role

_DEFAULT_TOKENS = 256  # of an answer, as in the harness's own models
_SUPPORTED = {"do_sample", "temperature", "top_p"}
_UNUSED_IF_GREEDY = {"top_k", "min_p", "typical_p"}


@dataclass(frozen=True)
class _Generation:
    """A generate_until request of the harness with its prompt as tokens and its settings checked."""

    prompt: ChatTokens
    until: tuple[str, ...]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int


@register_model("kvaudit")
class KvauditLM(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A model of lm-evaluation-harness whose cache is compressed by ``policy``.

    In ``--model_args``, write ";" instead of "," in the policy.
    """

    def __init__(
        self,
        pretrained: str = EMBEDDED,
        policy: str | None = None,
        dtype: str = "float32",
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,  # noqa: ARG002 - the harness passes it to every model
        seed: int = 0,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise SpecError(
                f"model_args has {', '.join(unknown)}, known are pretrained, policy, dtype, device, batch_size and "
                "seed; in a policy write ; for , such as policy=snapkv:budget=96;window=8"
            )
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise SpecError(f"batch_size is {batch_size!r}, expected a number of rows")
        parsed = parse_policy("none" if policy is None else policy.replace(";", ","))  # the harness reads none as None
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "auto"  # the harness's default is cuda:0
        self._loaded = pack_weights(load_model_or_adapter(pretrained, dtype=dtype, device=device))  # type: ignore[arg-type]
        self._sampler, self._rows, self._seed = Sampler(self._loaded, parsed), int(batch_size), seed
        self.tokenizer = self._loaded.chat.tokenizer
        self._rendered: dict[str, ChatTokens] = {}  # prompts by text, with the roles of their tokens

    @property
    def eot_token_id(self) -> int:
        """The id of the tokenizer's end-of-text token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The id of the token that the harness puts before a text without context: BOS, or else the end of text."""
        token = self.tokenizer.bos_token_id
        return self.eot_token_id if token is None else int(token)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name as the harness records it, with "__" for "/"."""
        return self._loaded.name.replace("/", "__")

    def get_model_info(self) -> dict[str, str]:
        """Return the facts that the harness adds to its results."""
        policy = self._sampler.policy
        names = {"policy": policy.canonical, "policy_hash": policy.hash, "model_sha256": self._loaded.sha256}
        return {"kvaudit": __version__, **names}

    def set_cache_hook(self, cache_hook: Any) -> NoReturn:  # noqa: ARG002
        """Raise SpecError, since the keys of the harness's answer cache include neither policy nor seed."""
        raise SpecError("--use_cache would give one policy's answers to another; leave it out")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a chat as text; if ``add_generation_prompt`` is False, its last message is the start of the answer."""
        messages = [Message(Role(row["role"]), row["content"]) for row in chat_history]
        prefix = "" if add_generation_prompt else messages.pop().content
        chat = self._loaded.chat
        prompt, ids = chat.prompt(messages), chat.encode(prefix)
        text = chat.prompt_text(messages) + prefix
        self._rendered[text] = ChatTokens(prompt.ids + ids, (*prompt.roles, *[str(Role.ASSISTANT)] * len(ids)))
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenize a text; add no BOS token if the text already begins with one."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return one answer per request, up to its first stop text."""
        repetitions = Counter[str]()
        generations = []
        for request in requests:
            context, settings = request.args
            generations.append(self._parse(context, settings, repetitions[context]))
            repetitions[context] += 1
        answers: dict[int, str] = {}
        groups = defaultdict[tuple[float, float], list[int]](list)  # by temperature and top_p
        # by length, so that batches have little padding
        for n, generation in sorted(enumerate(generations), key=lambda pair: len(pair[1].prompt.ids)):
            groups[generation.temperature, generation.top_p].append(n)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="kvaudit answers") as bar:
            for numbers in groups.values():
                answers |= zip(numbers, self._generate([generations[n] for n in numbers], bar), strict=True)
        return [answers[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> NoReturn:  # noqa: ARG002
        """Raise SpecError: scoring a whole text is one prefill, which is compressed differently from an answer."""
        raise SpecError(
            "loglikelihood_rolling asks how probable a whole text is: read in one prefill it would be compressed "
            "differently than a generated answer; use a generate_until or multiple_choice task"
        )

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-prob, nats summed over its tokens, and whether greedy sampling would give it.

        Continuations of one context are rows that share its prompt.
        """
        groups = defaultdict[tuple[str, tuple[int, ...]], list[int]](list)  # prompt -> its requests
        for number, ((context, _text), ids, _answer) in enumerate(requests):
            groups[context, tuple(ids)].append(number)
        results: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="kvaudit scores") as bar:
            keys = list(groups)
            for batch in (keys[start : start + self._rows] for start in range(0, len(keys), self._rows)):
                answers = [[requests[n][2] for n in groups[key]] for key in batch]
                prompts = [self._prompt(*key) for key in batch]
                for prompt, rows in zip(prompts, answers, strict=True):
                    self._check_fits(len(prompt.ids), max(map(len, rows)), shortest=min(map(len, rows)))
                seeds = [derive_seed("lm-eval", self._seed, context, 0) for context, _ids in batch]
                for key, scores in zip(batch, score_answers(self._sampler, prompts, answers, seeds), strict=True):
                    pairs = ((sum(score.logprobs), score.greedy) for score, _rollout in scores)
                    results |= zip(groups[key], pairs, strict=True)
                bar.update(sum(len(groups[key]) for key in batch))
        return [results[number] for number in range(len(requests))]

    def _parse(self, context: str, settings: dict[str, Any], repetition: int) -> _Generation:
        options = normalize_gen_kwargs(settings, _DEFAULT_TOKENS)
        until, max_tokens = (
            handle_stop_sequences(options.pop("until", None), eos=None),
            int(options.pop("max_gen_toks")),
        )
        if max_tokens < 1:
            raise SpecError(f"the task asks for answers of max_gen_toks {max_tokens}, expected 1 or more")
        temperature, top_p = float(options.get("temperature") or 0.0), float(options.get("top_p") or 1.0)
        supported = _SUPPORTED | (_UNUSED_IF_GREEDY if temperature == 0 else set())
        if unknown := sorted(name for name, value in options.items() if value is not None and name not in supported):
            raise SpecError(f"the task asks for {', '.join(unknown)}; kvaudit supports only temperature and top_p")
        prompt = self._prompt(context, tuple(self.tok_encode(context)))
        self._check_fits(len(prompt.ids), max_tokens)
        seed = derive_seed("lm-eval", self._seed, context, repetition)  # repetitions of a question are distinct draws
        return _Generation(prompt, tuple(filter(None, until)), max_tokens, temperature, top_p, seed)

    def _generate(self, generations: Sequence[_Generation], bar: Any) -> Iterator[str]:
        """Yield, in order, the answers to requests of equal temperature and top_p, ``batch_size`` of them at a time."""

        def start(numbers: range) -> AnyEpisode:
            batch = [generations[n] for n in numbers]
            prompts, roles = [entry.prompt.ids for entry in batch], [entry.prompt.roles for entry in batch]
            return sampler.open(prompts, [entry.seed for entry in batch], roles=roles)

        def is_stopped(n: int, ids: Sequence[int]) -> bool:
            return holds_stop(self._loaded.chat, ids, generations[n].until)

        def complete(n: int, completion: Completion) -> bool:
            completions[n] = completion
            bar.update()
            return False

        # ledgers of thousands of rows would never be read
        sampler = Sampler(self._loaded, self._sampler.policy, recorded=False)
        longest = max(generation.max_tokens for generation in generations)
        decoding = Decoding(longest, generations[0].temperature, generations[0].top_p)
        completions: dict[int, Completion] = {}
        arrivals = ContinuousBatch(start, len(generations), self._rows)
        for episode in arrivals:
            # completed rows draw no more
            limits = [0 if n in completions else generations[n].max_tokens for n in range(episode.rows)]
            episode.decode(decoding, limits, is_stopped, complete, arrivals.should_pause)
        for n, generation in enumerate(generations):
            ids = completions[n].ids
            text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            yield postprocess_generated_text(text, list(generation.until), None)

    def _prompt(self, context: str, ids: tuple[int, ...]) -> ChatTokens:
        """Return a context's tokens, each with a chat role: that of its message, or "user" if the context is no chat.

        Raises SpecError for a policy that pins roles if the context was not rendered from a chat.
        """
        rendered = self._rendered.get(context)
        if rendered is not None and rendered.ids[: len(ids)] == ids:  # scoring moves trailing spaces out of a context
            return ChatTokens(ids, rendered.roles[: len(ids)])
        if self._sampler.policy.pinned_roles:
            raise SpecError("the policy pins roles, which plain text does not have; add --apply_chat_template")
        return ChatTokens(ids, (str(Role.USER),) * len(ids))

    def _check_fits(self, prompt: int, answer: int, *, shortest: int = 1) -> None:
        if shortest == 0:
            raise SpecError("a continuation has no tokens, so it has no probability; correct the task")
        if prompt + answer > self._loaded.max_positions:
            raise SpecError(
                f"a prompt of {prompt} tokens and an answer of {answer} exceed the model's "
                f"{self._loaded.max_positions} positions, and kvaudit does not truncate prompts; use shorter documents"
            )
