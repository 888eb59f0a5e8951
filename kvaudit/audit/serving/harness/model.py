"""``kvaudit`` as a model of lm-evaluation-harness: it answers, and is scored, through a compressed cache.

Log-probabilities of given continuations are read token by token, as they would be drawn, and never in one prefill.
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
from kvaudit.audit.sampling.model import EMBEDDED
from kvaudit.audit.sampling.packing import pack_weights
from kvaudit.audit.sampling.sampler import AnyEpisode, ContinuousBatch, Completion, Decoding, Sampler
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Message, Role

_LONGEST_ANSWER = 256  # tokens, where a task says nothing; as the harness's own models have it
_DRAWN = {"do_sample", "temperature", "top_p"}
_OF_DRAWS_ALONE = {"top_k", "min_p", "typical_p"}  # settings without effect on greedy answers


@dataclass(frozen=True)
class _Wanted:
    context: str
    prompt: ChatTokens
    until: tuple[str, ...]
    longest: int
    sampling: tuple[float, float]  # temperature and top-p
    seed: int


@register_model("kvaudit")
class KvauditLM(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A model whose cache is compressed by ``policy``; ``--model_args`` want ";" where a policy has ","."""

    def __init__(
        self,
        pretrained: str = EMBEDDED,
        policy: str | None = None,
        dtype: str = "float32",
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,  # noqa: ARG002 - the harness hands it to every model
        seed: int = 0,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise SpecError(
                f"model_args has {', '.join(unknown)}, known are pretrained, policy, dtype, device, batch_size and "
                "seed; a policy is written with ; for , such as policy=snapkv:budget=96;window=8"
            )
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise SpecError(f"batch_size is {batch_size!r}, wanted a number of rows")
        chosen = parse_policy("none" if policy is None else policy.replace(";", ","))  # the harness reads none as None
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "auto"  # the harness names cuda:0 where nobody did
        self._loaded = pack_weights(load_model_or_adapter(pretrained, dtype=dtype, device=device))  # type: ignore[arg-type]
        self._sampler, self._rows, self._seed = Sampler(self._loaded, chosen), int(batch_size), seed
        self.tokenizer = self._loaded.chat.tokenizer
        self._rendered: dict[str, ChatTokens] = {}  # prompts made from a chat, whose tokens have roles

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that a text is scored behind where it has no context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in logs."""
        return self._loaded.name.replace("/", "__")

    def get_model_info(self) -> dict[str, str]:
        """What the harness writes beside its results."""
        policy = self._sampler.policy
        names = {"policy": policy.canonical, "policy_hash": policy.hash, "model_sha256": self._loaded.sha256}
        return {"kvaudit": __version__, **names}

    def set_cache_hook(self, cache_hook: Any) -> NoReturn:  # noqa: ARG002
        """Refuse the harness's cache of answers: it knows the question alone, and neither policy nor seed."""
        raise SpecError("--use_cache would give one policy's answers to another; leave it out")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a chat as text; an answer that is begun for the model stands at its end."""
        messages = [Message(Role(row["role"]), row["content"]) for row in chat_history]
        begun = "" if add_generation_prompt else messages.pop().content
        chat = self._loaded.chat
        prompt, ids = chat.prompt(messages), chat.encode(begun)
        text = chat.prompt_text(messages) + begun
        self._rendered[text] = ChatTokens(prompt.ids + ids, (*prompt.roles, *[str(Role.ASSISTANT)] * len(ids)))
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """A text as tokens; one that begins with the first token as text gets no second one."""
        if add_special_tokens is None:
            first = self.tokenizer.bos_token
            add_special_tokens = not (first and string.startswith(first))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """One answer per request, up to the first text that ends it."""
        asked = Counter[str]()
        wanted = []
        for request in requests:
            context, settings = request.args
            wanted.append(self._wanted(context, settings, asked[context]))  # the how manyth time it is asked
            asked[context] += 1
        answers: dict[int, str] = {}
        alike = defaultdict[tuple[float, float], list[int]](list)
        for number in sorted(range(len(wanted)), key=lambda n: len(wanted[n].prompt.ids)):  # like lengths pad little
            alike[wanted[number].sampling].append(number)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="kvaudit answers") as bar:
            for numbers in alike.values():
                answers |= zip(numbers, self._drawn([wanted[n] for n in numbers], bar), strict=True)
        return [answers[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> NoReturn:  # noqa: ARG002
        """Refused: a whole text has no answer whose tokens could be drawn."""
        raise SpecError(
            "loglikelihood_rolling asks how probable a whole text is: read in one prefill it would be compressed "
            "otherwise than an answer that is written; take a generate_until or multiple_choice task"
        )

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Continuations of one context are rows behind one prompt, and each is fed token by token."""
        groups = defaultdict[tuple[str, tuple[int, ...]], list[int]](list)  # prompts, each with its continuations
        for number, ((context, _text), ids, _answer) in enumerate(requests):
            groups[context, tuple(ids)].append(number)
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="kvaudit scores") as bar:
            keys = list(groups)
            for batch in (keys[start : start + self._rows] for start in range(0, len(keys), self._rows)):
                answers = [[requests[n][2] for n in groups[key]] for key in batch]
                prompts = [self._prompt(*key) for key in batch]
                for prompt, own in zip(prompts, answers, strict=True):
                    self._check_fits(len(prompt.ids), max(map(len, own)), shortest=min(map(len, own)))
                seeds = [derive_seed("lm-eval", self._seed, context, 0) for context, _ids in batch]
                for key, rows in zip(batch, score_answers(self._sampler, prompts, answers, seeds), strict=True):
                    scored = ((sum(own.logprobs), own.greedy) for own, _rollout in rows)
                    found |= zip(groups[key], scored, strict=True)
                bar.update(sum(len(groups[key]) for key in batch))
        return [found[number] for number in range(len(requests))]

    def _wanted(self, context: str, settings: dict[str, Any], turn: int) -> _Wanted:
        given = normalize_gen_kwargs(settings, _LONGEST_ANSWER)
        until, longest = handle_stop_sequences(given.pop("until", None), eos=None), int(given.pop("max_gen_toks"))
        if longest < 1:
            raise SpecError(f"the task asks for answers of max_gen_toks {longest}, wanted 1 or more")
        sampling = (float(given.get("temperature") or 0.0), float(given.get("top_p") or 1.0))
        idle = _OF_DRAWS_ALONE if sampling[0] == 0 else set()
        if unknown := sorted(name for name, value in given.items() if value is not None and name not in _DRAWN | idle):
            raise SpecError(f"the task asks for {', '.join(unknown)}; kvaudit draws with temperature and top_p alone")
        prompt = self._prompt(context, tuple(self.tok_encode(context)))
        self._check_fits(len(prompt.ids), longest)
        seed = derive_seed("lm-eval", self._seed, context, turn)  # the same question again is another draw
        return _Wanted(context, prompt, tuple(filter(None, until)), longest, sampling, seed)

    def _drawn(self, wanted: Sequence[_Wanted], bar: Any) -> Iterator[str]:
        """The answers to prompts of one temperature, as many at once as the batch has rows."""

        def opened(numbers: range) -> AnyEpisode:
            some = [wanted[n] for n in numbers]
            prompts, roles = [one.prompt.ids for one in some], [one.prompt.roles for one in some]
            return sampler.open(prompts, [one.seed for one in some], roles=roles)

        def ended(n: int, ids: Sequence[int]) -> bool:
            return holds_stop(self._loaded.chat, ids, wanted[n].until)

        def heard(n: int, completion: Completion) -> bool:
            completions[n] = completion
            bar.update()
            return False

        # a task asks thousands, and nobody for their ledgers
        sampler = Sampler(self._loaded, self._sampler.policy, recorded=False)
        temperature, top_p = wanted[0].sampling
        decoding = Decoding(max(one.longest for one in wanted), temperature, top_p)
        completions: dict[int, Completion] = {}
        arrivals = ContinuousBatch(opened, len(wanted), self._rows)
        for episode in arrivals:
            # rows that are over draw no more
            limits = [0 if n in completions else wanted[n].longest for n in range(episode.rows)]
            episode.decode(decoding, limits, ended, heard, arrivals.should_pause)
        for n, one in enumerate(wanted):
            ids = completions[n].ids
            text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            yield postprocess_generated_text(text, list(one.until), None)

    def _prompt(self, context: str, ids: tuple[int, ...]) -> ChatTokens:
        """Tokens with the roles they have in the chat that the context was made from; plain text is the user's."""
        known = self._rendered.get(context)
        if known is not None and known.ids[: len(ids)] == ids:  # a score's context ends before its last white space
            return ChatTokens(ids, known.roles[: len(ids)])
        if self._sampler.policy.pinned_roles:
            raise SpecError("the policy pins roles, which plain text has not; add --apply_chat_template")
        return ChatTokens(ids, (str(Role.USER),) * len(ids))

    def _check_fits(self, prompt: int, answer: int, *, shortest: int = 1) -> None:
        if shortest == 0:
            raise SpecError("a continuation without a single token has no probability; mend the task")
        if prompt + answer > self._loaded.max_positions:
            raise SpecError(
                f"a prompt of {prompt} tokens and an answer of {answer} exceed the model's "
                f"{self._loaded.max_positions} positions, and kvaudit cuts no prompt; take shorter documents"
            )
