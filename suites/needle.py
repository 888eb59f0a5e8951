"""A sentence to be found in a haystack by what it means: the question has none of its words (after NoLiMa, Modarressi
et al. 2025, arXiv:2502.05167; facts and questions are our own)."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from kvaudit.core.records import Grade, Item, Message, Role
from kvaudit.core.spans import marked
from kvaudit.suites.base import CountTokens, Split, Suite, formless, graded
from kvaudit.suites.haystack import fit, put, scatter
from kvaudit.suites.published import own_part
from kvaudit.suites.templates import place
from kvaudit.suites.vocabulary import PEOPLE

# kind: what the needle says | what the question asks; no two of a kind are true of the same person
_PLACES = """
lives across from the Eiffel Tower | has a home in France
rents a room by the Colosseum | has a home in Italy
can see Big Ben from the kitchen | has a home in England
jogs around the Brandenburg Gate | has a home in Germany
sells postcards at the Acropolis | works in Greece
grew up next to the Kremlin | was a child in Russia
guides visitors through the Alhambra | works in Spain
walks to school past the Taj Mahal | is a pupil in India
camps each summer at the foot of Fuji | spends holidays in Japan
takes photographs of the Sphinx | works in Egypt
sweeps the steps of Machu Picchu | works in Peru
flies kites on the beach of Copacabana | spends afternoons in Brazil
paints the harbour bridge of Sydney | works in Australia
hikes to the Little Mermaid statue every Sunday | spends weekends in Denmark
wakes up to the bells of Saint Stephen in Vienna | has a home in Austria
owns a stall beside the Hagia Sophia | works in Turkey
has lectures in the shadow of Table Mountain | is a student in South Africa
repairs windmills near Rotterdam | works in the Netherlands
milks cows below the Matterhorn | works in Switzerland
sleeps in a hut by the Geysir | stays in Iceland
drinks stout on the quays of the Liffey | has evenings off in Ireland
photographs moose near Stockholm | works in Sweden
climbs the Great Wall on Fridays | spends weekends in China
has an office with a view of the White House | works in the United States
dances where the tango was born, in Buenos Aires | performs in Argentina
picks dates below the minarets of Marrakesh | works in Morocco
counts lions in the Serengeti | works in Tanzania
lights lamps at Angkor Wat | works in Cambodia
polishes the doors of the Petronas Towers | works in Malaysia
feeds pigeons on the Charles Bridge | spends mornings in Czechia
ferries guests to the fjord of Bergen | works in Norway
plays cards in the cafes of Havana | spends evenings in Cuba
"""
_TRADES = """
keeps a stethoscope in the bag | treats patients
kneads dough at four in the morning | makes bread
wears a white wig before the judge | argues in court
tunes engines with a torque wrench | repairs cars
drills molars all day | looks after teeth
climbs ladders when sirens howl | puts out fires
checks tickets between Leeds and York | is employed by a railway
takes off with two hundred passengers | flies aircraft
writes sonnets until midnight | is a poet
shears the flock each spring | farms sheep
hauls lobster pots at dawn | catches seafood
fits taps and clears drains | is a plumber
lays bricks in straight rows | builds walls
corrects essays of the third form | teaches children
signs out novels with a rubber stamp | lends books
cuts fringes and dyes curls | styles hair
hammers glowing horseshoes | forges iron
grinds lenses for the nearsighted | provides glasses
mixes cocktails behind the counter | serves drinks
plants tulips in the royal park | is a gardener
throws clay on a spinning wheel | makes pottery
sews suits to measure | is a tailor
nails soles onto boots | mends footwear
digs for coal underground | is a miner
points a baton at the strings | conducts an orchestra
vaccinates kittens and calves | is a vet
sweeps soot from flues | cleans chimneys
draws plans for new bungalows | designs houses
carries letters from gate to gate | delivers the post
hands out pills against a prescription | runs a pharmacy
stuffs sausages and ties them off | is a butcher
adds up other firms' ledgers | does accounting
"""
_HABITS = """
brushes the coat of a poodle | owns a dog
empties the litter tray of a Siamese | owns a cat
covers the cage of a canary at dusk | owns a bird
saddles a mare before breakfast | rides a horse
heats the glass box of a python | owns a snake
tops up the tank of a clown loach | owns a fish
tends hives behind a veil | gathers honey
practises scales on a Stradivari | plays the violin
oils the valves of a trumpet | is heard on a brass instrument
sits at the Steinway for hours | plays the piano
points a telescope at Orion | watches the stars
never drinks milk, which ends in cramps | must avoid dairy
swells up after one peanut | has a nut allergy
turns down anything baked from wheat | cannot eat gluten
touches neither beef nor pork nor poultry | is a vegetarian
rolls the mat out for the cobra pose | does yoga
waxes a board and waits for waves | goes surfing
clips into bindings at the top of the slope | goes skiing
ties flies and stands in the river | goes angling
laces gloves and skips rope in the ring | goes boxing
opens with the queen's gambit | plays chess
pulls on a wetsuit to visit wrecks | goes diving
folds cranes out of paper | does origami
hangs negatives up in a dark cellar | develops photographs
knots a rope below the overhang | goes climbing
fills albums with old penny blacks | collects stamps
polishes coins from ancient Rome | collects money of antiquity
purls two and drops one | knits
rows of vines are this one's pride | grows grapes
glides over the rink on sharp blades | goes ice skating
aims for the bull's eye on the pub's wall | plays darts
bows to the sensei before a throw | does judo
"""
_ASKED = "Which person {question}? Answer with the first name alone."
_SYSTEM = "You read files and answer questions about them."
_DISTRACTORS = 4


class Fact(NamedTuple):
    """What a needle says of somebody, and the question that it answers."""

    kind: int
    statement: str
    question: str


FACTS = tuple(
    Fact(kind, *(part.strip() for part in line.split("|")))
    for kind, bank in enumerate((_PLACES, _TRADES, _HABITS))
    for line in bank.strip().splitlines()
)


class Needle(Suite):
    """The capability to find what a context holds. Other people, of whom the like is said, are the distractors."""

    name = "needle"
    kind = "capability"
    source = "procedural, written for this project"
    licence = "Apache-2.0"
    max_new_tokens = 64
    placements = ("start", "middle", "end")  # of the needle in the haystack

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:
        pool = own_part(range(len(FACTS)), split)
        random.Random(f"{self.name}-{split}-{seed}").shuffle(pool)
        return [self._item(split, index, seed, pool, fitting=(context_tokens, count_tokens)) for index in range(n)]

    def facets(self, item: Item) -> tuple[str, ...]:  # noqa: ARG002
        return ("solved",)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        named = set(re.findall(r"[a-z]+", transcript[-1].content.lower()))
        if not named:
            return formless("no words", self.facets(item))
        named &= set(PEOPLE)
        if named == {item.payload["who"]}:
            return graded(True, {"solved": True})
        told = named & {item.payload["who"], *item.payload["others"]}
        note = "nobody" if not named else "several" if len(named) > 1 else "a distractor" if told else "a stranger"
        return graded(False, {"solved": False}, f"named {note}")

    def gold(self, item: Item) -> tuple[str, ...]:
        return (str(item.payload["who"]).capitalize(),)

    def _item(self, split: Split, index: int, seed: int, pool: list[int], *, fitting: tuple[int, CountTokens]) -> Item:
        context_tokens, count_tokens = fitting
        number, _, group, turn = place(index, len(pool), 1)
        fact, cluster = FACTS[pool[number]], f"{self.name}-{pool[number]}"
        origin = f"{cluster}-s{seed}-t{context_tokens}-g{group}"
        draw = random.Random(f"{split}-{origin}")
        placement = self.placements[turn % len(self.placements)]
        alike = [FACTS[other] for other in pool if FACTS[other].kind == fact.kind and FACTS[other] != fact]
        who, *others = draw.sample(PEOPLE, 1 + _DISTRACTORS)
        like = draw.sample(alike, _DISTRACTORS)
        distractors = [f"{name.capitalize()} {other.statement}." for name, other in zip(others, like, strict=True)]
        needle = f"{who.capitalize()} {fact.statement}."
        weave = draw.random()  # ``fit`` calls ``build`` again and again, and it must give the same

        def build(lines: Sequence[str]) -> list[str]:
            woven = scatter(random.Random(weave), lines, distractors)
            return [_SYSTEM, "\n".join([*put(woven, needle, placement), _ASKED.format(question=fact.question)])]

        system, user = fit(build, draw, context_tokens, count_tokens)
        return Item(
            suite=self.name,
            item_id=origin,
            cluster_id=cluster,
            messages=(Message(Role.SYSTEM, system), Message(Role.USER, user)),
            context_tokens=context_tokens,
            placement=placement,
            payload={"who": who, "others": others, "needle": needle},
            spans=marked(needle=needle, question=_ASKED.format(question=fact.question)),
        )
