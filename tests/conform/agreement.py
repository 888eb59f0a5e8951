"""One play on both sides: the product as users call it, and the simulator; how far apart they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from conform.plays import Conversation, Forwards, Play, served, simulated
from conform.simulator import Row
from kvaudit import CompressedCache, shadow
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.cache.selection import Selection
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.replay.learner_pass import suffix_logits
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.sampler import AnyEpisode, Sampler, join_episodes


class Disagreement(AssertionError):
    """The product and the simulator are not one."""


def gap(play: Play) -> float:
    """Largest difference in any log-prob, nats, of sampler and shadow; Disagreement where other entries left."""
    return spoken(play) if isinstance(play, Conversation) else fed(play)


# --- the sampler and the learner's pass -----------------------------------------------------------------------------


def spoken(play: Conversation) -> float:
    """Groups of rows that answer and are answered, then the learner's pass over what came of it."""
    prompts = [play.tokens(n, length) for n, length in enumerate(play.lengths)]
    roles = [
        ["system" if n in pins else "user" for n in range(len(p))] for p, pins in zip(prompts, play.pins, strict=True)
    ]
    sampler = Sampler(served(play.family), parse_policy(play.policy))
    begins = slice(0, len(prompts) - (play.late is not None))
    episode = opened(sampler, play, prompts, roles, begins)
    rows = [Row(simulated(play.family), play.request(n, play.group)) for n in range(len(play.seeds))]
    for n, row in enumerate(rows):
        row.give(prompts[n // play.group], [role == "system" for role in roles[n // play.group]])
        row.go_on()  # a prompt enters at once, a message when its row is next asked to answer
    drawn: list[list[float]] = [[] for _ in rows]
    last = [max((turn for turn, (limits, _) in enumerate(play.turns, 1) if limits[n]), default=0) for n in play.rows]
    for turn, (limits, lengths) in enumerate(play.turns, start=1):
        goes_on = [not (play.leaving and turn >= last[n]) for n in play.rows]
        decoding = Decoding(max(*limits, 1), play.temperature)
        heard = lambda n, _, goes_on=goes_on: goes_on[n]  # noqa: E731 - bound to this turn
        if turn == 1 and play.late is not None:
            early = limits[: episode.rows]
            begun = episode.decode(decoding, early, None, heard, pauses_after(play.late)) if play.late else []
            join_episodes(episode, opened(sampler, play, prompts, roles, slice(begins.stop, None)))
            begun += [None] * (len(limits) - len(begun))
            rest = [0 if done else limit for done, limit in zip(begun, limits, strict=True)]
            ended = episode.decode(decoding, rest, None, heard)
            answers = [one or other for one, other in zip(begun, ended, strict=True)]
        else:
            answers = episode.decode(decoding, limits, None, heard)
        messages = [play.tokens(100 * turn + n, length if goes_on[n] else 0) for n, length in enumerate(lengths)]
        marks = [[n < play.marked for n in range(len(message))] for message in messages]
        episode.extend(messages, [["system" if mark else "tool" for mark in own] for own in marks])
        for n, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            if answer is not None:
                row.draw(answer.ids)
                drawn[n] += answer.logprobs
            row.give(messages[n], marks[n])
    rollouts, worst = episode.rollouts(), 0.0
    for n, row in enumerate(rows):
        if row.waiting:
            row.go_on()
        worst = max([worst, *differences(row, row.drawn, drawn[n], play.temperature)])
        same_departures(row, rollouts[n].evicted_at)
        same_choices(row, rollouts[n].selection)
    return max([worst, *learned(play, rows, rollouts)]) if play.replayable else worst


def opened(
    sampler: Sampler, play: Conversation, prompts: list[list[int]], roles: list[list[str]], some: slice
) -> AnyEpisode:
    """The groups of some of the prompts."""
    first, stop, _ = some.indices(len(prompts))
    seeds = play.seeds[first * play.group : stop * play.group]
    return sampler.open(prompts[some], seeds, group=play.group, roles=roles[some])


def pauses_after(tokens: int) -> Callable[[], bool]:
    """Says so once it was asked that often."""
    steps = itertools.count(1)
    return lambda: next(steps) >= tokens


def learned(play: Conversation, rows: Sequence[Row], rollouts: Sequence[Rollout]) -> Iterator[float]:
    """Differences of the learner's pass, over every token behind the prompts, given ones too."""
    mixed = len(play.parts) > 1  # then members of a group have policies of their own, and each is a batch by itself
    for batch in [[n] for n in range(len(rows))] if mixed else [range(len(rows))]:
        chosen = [rollouts[n] for n in batch]
        if max(len(rollout.ids) - rollout.prompt_length for rollout in chosen) == 0:
            continue
        with torch.no_grad():
            group = 1 if mixed else play.group
            logits, _ = suffix_logits(served(play.family).model, chosen, group=group, view="shadow")
        for n, rollout, scores in zip(batch, chosen, logits, strict=True):
            told = rollout.ids[rollout.prompt_length :]
            found = scores[: len(told)].log_softmax(-1).gather(1, told[:, None])[:, 0]
            yield from differences(rows[n], range(rollout.prompt_length, len(rollout.ids)), found.tolist())


# --- the public cache and the public shadow pass --------------------------------------------------------------------


@torch.no_grad()
def fed(play: Forwards) -> float:
    """Calls of the model with a public cache, one chunk each, then the public shadow pass over all of them."""
    model, parts = served(play.family).model, [torch.tensor(mask) for mask in play.masks]
    mask = torch.cat(parts, 1)
    ids = torch.where(mask, torch.tensor([play.tokens(n, mask.shape[1]) for n in range(len(mask))]), 0)
    pinned = pinned_columns(play, parts[0]) if "pin" in play.parts[0].evictor else None
    past = CompressedCache.for_model(model, play.policy, seed=play.seeds[0], pinned=pinned)
    rows = [Row(simulated(play.family), play.request(n)) for n in range(len(ids))]
    logits, start = [], 0
    for part in parts:
        now = slice(start, start + part.shape[1])
        seen = mask[:, : now.stop].long()
        logits.append(model(ids[:, now], attention_mask=seen, past_key_values=past).logits)
        for n, row in enumerate(rows):
            if part[n].any():
                pins = None if pinned is None or start else pinned[n][part[n]].tolist()
                # one token by itself counts as drawn, unless it is the first of all
                row.feed(ids[n, now][part[n]].tolist(), decoding=bool(start) and part.shape[1] == 1, pinned=pins)
        start = now.stop
    worst = told_apart(rows, torch.cat(logits, 1), ids, mask)
    if not play.replayable:
        return worst
    selections = past.ledger.selections or [None] * len(rows)
    for row, table, made in zip(rows, past.ledger.evicted_at, selections, strict=True):
        same_departures(row, table)
        same_choices(row, made)
    with shadow(model, past.ledger):
        replayed = model(ids, attention_mask=mask.long()).logits
    return max(worst, told_apart(rows, replayed, ids, mask))


def pinned_columns(play: Forwards, first: Tensor) -> Tensor:
    """Which columns of the first call are pinned; pins count real tokens."""
    rows = zip(play.pins, (first.cumsum(1) - 1).tolist(), strict=True)
    return first & torch.tensor([[at in pins for at in row] for pins, row in rows])


def told_apart(rows: Sequence[Row], logits: Tensor, ids: Tensor, mask: Tensor) -> float:
    """Largest difference in the log-probs of the tokens that came next, over all real tokens but each row's last."""
    worst = 0.0
    for row, scores, text, real in zip(rows, logits, ids, mask, strict=True):
        told = text[real][1:]
        found = scores[real][:-1].log_softmax(-1).gather(1, told[:, None])[:, 0]
        worst = max([worst, *differences(row, range(1, len(told) + 1), found.tolist())])
    return worst


# --- what is compared -----------------------------------------------------------------------------------------------


def differences(row: Row, at: Sequence[int], found: Sequence[float], temperature: float = 1.0) -> list[float]:
    """How far log-probs found for the tokens at these positions are from the simulator's."""
    expected = row.log_probs(temperature)
    return [abs(value - float(expected[n - 1])) for n, value in zip(at, found, strict=True)]


def same_departures(row: Row, evicted_at: Tensor) -> None:
    """Hold a ledger [L, H, T] to what left the simulator's row when, in every layer that a policy governs."""
    for layer in row.governed_layers:
        for head, gone in enumerate(layer.gone):
            times = evicted_at[layer.number, head].tolist()
            recorded = {j: time for j, time in enumerate(times) if time < NEVER}
            if recorded != gone:
                where = f"layer {layer.number}, head {head}"
                raise Disagreement(f"{where}: entries left at {recorded}, the simulator says {gone}")


def chosen_keys(selection: Selection, layer: int, head: int, heads: int) -> dict[int, frozenset[int]]:
    """Return {query: positions of the keys that it saw} for each selecting query, in one layer and head."""
    if layer not in selection.layers:
        return {}
    lists = selection.chosen[selection.layers.index(layer)]
    units = lists[head * len(lists) // heads].tolist()  # neighbouring heads share a list
    return {
        query: frozenset(p for p in range(query + 1) if p // selection.unit in chosen)
        for query, chosen in zip(selection.queries.tolist(), units, strict=True)
    }


def same_choices(row: Row, made: Selection | None) -> None:
    """Hold a record to what the simulator's queries chose, in every layer and query head; no record: everything."""
    for layer in row.governed_layers:
        for head in range(len(layer.queries[0])):
            recorded = {} if made is None else chosen_keys(made, layer.number, head, len(layer.queries[0]))
            own = {query: keys for (number, query), keys in layer.chosen.items() if number == head}
            for query in {*own, *recorded}:
                everything = frozenset(range(query + 1))
                found, said = recorded.get(query, everything), own.get(query, everything)
                if found != said:
                    where = f"layer {layer.number}, query head {head}"
                    raise Disagreement(
                        f"{where}: query {query} chose {sorted(found)}, the simulator says {sorted(said)}"
                    )
