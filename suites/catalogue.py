"""The public rows that suites read: where each file lies, under which licence, and the sha256 that holds it.

An address is pinned to a commit, so it cannot change; the hash is of the rows as suites read them, after the cut where
only the first rows of a file are asked.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from kvaudit.core.errors import DataError, UnknownName

ADDRESS = "https://raw.githubusercontent.com"


class PublicFile(NamedTuple):
    """A file below the folder of public rows. ``first``: only so many of its lines, None for all of them."""

    path: str
    upstream: str  # its path in the repository
    sha256: str
    first: int | None = None


@dataclass(frozen=True)
class PublicRows:
    """Rows that are fetched together; ``suites`` read them. ``rows`` says how many there are, in words."""

    name: str
    suites: tuple[str, ...]
    rows: str
    licence: str
    repo: str
    commit: str
    files: tuple[PublicFile, ...]

    @property
    def whence(self) -> str:
        """The repository and the beginning of its commit."""
        return f"github.com/{self.repo}@{self.commit[:7]}"

    def address(self, file: PublicFile, base: str = ADDRESS) -> str:
        """Where a file lies; ``base`` is another place with the same paths."""
        return f"{base.rstrip('/')}/{self.repo}/{self.commit}/{quote(file.upstream)}"

    def lacking(self, folder: Path) -> list[PublicFile]:
        """The files that a folder does not hold."""
        return [file for file in self.files if not (folder / file.path).is_file()]

    def other(self, folder: Path) -> list[PublicFile]:
        """The files that a folder holds with other rows than these."""
        there = [file for file in self.files if (folder / file.path).is_file()]
        return [f for f in there if hashlib.sha256((folder / f.path).read_bytes()).hexdigest() != f.sha256]


def checked(file: PublicFile, raw: bytes) -> bytes:
    """The rows of a file as it was fetched; raises DataError where they are not those that were named."""
    rows = raw if file.first is None else b"".join(raw.splitlines(keepends=True)[: file.first])
    found = hashlib.sha256(rows).hexdigest()
    if found != file.sha256:
        raise DataError(
            f"what was fetched for {file.path} has sha256 {found[:12]}, wanted {file.sha256[:12]}: it is another file, "
            "or was changed on the way; nothing of it is kept"
        )
    return rows


def named_rows(name: str) -> PublicRows:
    """The rows of this name; raises UnknownName."""
    found = {one.name: one for one in CATALOGUE}
    if name not in found:
        raise UnknownName("public rows", name, found)
    return found[name]


def rows_with(path: str) -> PublicRows | None:
    """The rows to which a file below the folder belongs, None where nobody may fetch it for you."""
    return next((one for one in CATALOGUE if any(file.path == path for file in one.files)), None)


_TABLES = "instruction_hierarchy"
_SYSTEM_CHECK = ("normster/SystemCheck", "a8d5ca7ae5dcd0c7176aa5848305d73bf1c4d09b")
_GRADE_SCHOOL = ("openai/grade-school-math", "3101c7d5072418e28b9008a6636bde82a006892c")
_DIRECTION = ("andyrdt/refusal_direction", "9d852fae1a9121c78b29142de733cb1340770cc3")
_GORILLA = ("ShishirPatil/gorilla", "6ea57973c7a6097fd7c5915698c54c17c5b1b6c8")


def _tensortrust(name: str, sha256: str, first: int) -> PublicFile:
    return PublicFile(f"{_TABLES}/tensortrust_{name}.jsonl", f"evals/tensortrust/inputs/{name}.jsonl", sha256, first)


def _bfcl(name: str, sha256: str) -> PublicFile:
    return PublicFile(f"bfcl/{name}.json", f"berkeley-function-call-leaderboard/bfcl_eval/data/{name}.json", sha256)


def _injecagent(name: str, sha256: str) -> PublicFile:
    return PublicFile(f"injecagent/{name}", f"InjecAgent/data/{name}", sha256)


def _typology(side: str, sha256: str) -> PublicFile:
    upstream = f"sycophancy/political_typology_quiz_liberal-bio_{side}.jsonl"
    return PublicFile(f"sycophancy/anthropic_political_typology_{side}.jsonl", upstream, sha256)


CATALOGUE = (
    PublicRows(
        "xstest",
        ("xstest",),
        "450",
        "CC-BY-4.0",
        "paul-rottger/exaggerated-safety",
        "d7bb5bd738c1fcbc36edd83d5e7d1b71a3e2d84d",
        (
            PublicFile(
                "xstest/xstest_prompts.csv",
                "xstest_prompts.csv",
                "11783fb294ed017473ee53c207d71f2161c7672c8d0b037501e78387f801cb5a",
            ),
        ),
    ),
    PublicRows(
        "strongreject",
        ("strongreject",),
        "313",
        "MIT",
        *_DIRECTION,
        (
            PublicFile(
                "strongreject/strongreject_dataset.csv",
                "dataset/raw/strongreject.csv",
                "4dd70357e4ff8b5d0ba5ebafecab5d6dd5633ce8046e3dd1c8bd93e64de44381",
            ),
        ),
    ),
    PublicRows(
        "advbench",
        ("advbench",),
        "520",
        "MIT",
        *_DIRECTION,
        (
            PublicFile(
                "advbench/advbench.csv",
                "dataset/raw/advbench.csv",
                "6cd1a5c63c07610d7eb67307772ee5606017ee950b5770ab288a2c487489d3e1",
            ),
        ),
    ),
    PublicRows(
        "harmbench",
        ("harmbench",),
        "400",
        "MIT",
        "busycalibrating/AdversariaLLM",
        "f970939273ea17b491fadf6001fddc36ed3ae3ff",
        (
            PublicFile(
                "harmbench/harmbench_behaviors_text_all.csv",
                "data/behavior_datasets/harmbench_behaviors_text_all.csv",
                "2745611872be3b2eab141e39bb328b8c1140dc3cd8d0a49da6174260d9ccbfb9",
            ),
        ),
    ),
    PublicRows(
        "tensortrust",
        ("tensortrust",),
        "370 + 500 + 700, the first of 570 + 776 + 1060",
        "BSD-2-Clause",
        *_SYSTEM_CHECK,
        (
            _tensortrust("extraction", "b32250abbeb08bce1024f9bb074786dce51f8c411c2d217c70dd8f2966d68b87", 370),
            _tensortrust("hijacking", "a4daa9b4e4709fbd73c688b2cd977c0bbce7c3204393344988326c7905c1fc6b", 500),
            _tensortrust("helpful", "54e347e358be6b69e20241d4df35abf2c1b6ee39ab1c78cf2242df044e235f3d", 700),
        ),
    ),
    PublicRows(
        "ifeval",
        ("sysifeval",),
        "541 + 400, the first of 541 + 541",
        "Apache-2.0",
        *_SYSTEM_CHECK,
        (
            PublicFile(
                "instruction_hierarchy/ifeval_ifeval.jsonl",
                "evals/ifeval/inputs/ifeval.jsonl",
                "7d8bfbe519440af273373a43092f59b5281745a6adc4805c4fed19466f778d36",
            ),
            PublicFile(
                "instruction_hierarchy/ifeval_sys_ifeval.jsonl",
                "evals/ifeval/inputs/sys_ifeval.jsonl",
                "773e3f3842493a3be2c704dec06255cbaf18473dbf03ea468d200cb751135cbd",
                400,
            ),
        ),
    ),
    PublicRows(
        "realguardrails",
        ("realguardrails",),
        "350, the first of 504",
        "MIT",
        *_SYSTEM_CHECK,
        (
            PublicFile(
                "instruction_hierarchy/realguardrails_distractors.jsonl",
                "evals/realguardrails/inputs/distractors.jsonl",
                "d5dea24ae4bb50a0917f5ddff7aeb8e9c3ebe6c8583a14ed0207ffd0b67c5db7",
                350,
            ),
        ),
    ),
    PublicRows(
        "injecagent",
        ("injecagent",),
        "17 users, 30 attackers",
        "MIT",
        "uiuc-kang-lab/AdaptiveAttackAgent",
        "7ea08cf4424e689079c6bc6348e28fbb84a090eb",
        (
            _injecagent("user_cases.jsonl", "c840e2b00fdce68e7142d0970220522303d67b2530d6fb36ef1112448cdd8977"),
            _injecagent("attacker_cases_dh.jsonl", "999d52e15af3c80a3303a09430af0f3878d1f91e4c573ca7b477a91cdfa6b991"),
            _injecagent("tools.json", "e21a8f70b1d5de4677d6d52642936a322655d79b17a72c84f600550384083a1e"),
        ),
    ),
    PublicRows(
        "gsm8k",
        ("gsm8k",),
        "1000 + 2000, the first of 1319 + 7473",
        "MIT",
        *_GRADE_SCHOOL,
        (
            PublicFile(
                "gsm8k/test.jsonl",
                "grade_school_math/data/test.jsonl",
                "5020a06ac8c7739794ddcb7391660a8d005ab5f9c800390fe7ce0b87f1753391",
                1000,
            ),
            PublicFile(
                "gsm8k/train_first2000.jsonl",
                "grade_school_math/data/train.jsonl",
                "45926aa7b33a4d57392a712ec0fc718a68cc2e33422658ddda76af4c305f24ce",
                2000,
            ),
        ),
    ),
    PublicRows(
        "math500",
        ("math500",),
        "350, the first of 500",
        "MIT",
        "hkust-nlp/simpleRL-reason",
        "cf1c7858bfc145a27aa733e75d930d34f0d318a6",
        (
            PublicFile(
                "math_eval/math500.jsonl",
                "examples/simplelr_math_eval/data/math500/test.jsonl",
                "fec266510450cf32e46da5c3c356550be724d3c0530f7c143a139e464019efba",
                350,
            ),
        ),
    ),
    PublicRows(
        "bfcl",
        ("bfcl",),
        "1240",
        "Apache-2.0",
        *_GORILLA,
        (
            _bfcl("BFCL_v4_irrelevance", "2b6ed4c2e992cdcf5f1678a701851f944bef7550ee026ed1ddb89efed5be01a6"),
            _bfcl("BFCL_v4_multi_turn_base", "1a21a995d06fd6f20ba55de7bced30ef953ec35e998f502ec2ecf4d66ef1c43a"),
            _bfcl("BFCL_v4_multiple", "aef168155ebd74b7ac2401198b201343bc7d16d7a3d7e0d4e6d8ee82c6969b2a"),
            _bfcl("BFCL_v4_parallel", "19f51a82eff42e5d62541aa500115a056eb78f437c2ba1f10415fd7c8e5dda84"),
            _bfcl("BFCL_v4_simple_python", "82dd63ba502eb2520c6b5d1d9a5c4b590e03ff261565175561f6228a367d1991"),
            _bfcl(
                "multi_turn_func_doc/gorilla_file_system",
                "c4c1b741c71e2a17c97a5dc9c4a91d89978c4eaece56494d14272d5df6c650e9",
            ),
            _bfcl("multi_turn_func_doc/math_api", "83fa31708c89442bdcf12ac4dfbe3be8663ec9183a1b1524a9fda98164bc7e0b"),
            _bfcl(
                "multi_turn_func_doc/message_api", "4d58ea933a5d2b280d7a52366617fb47fecd333d7b0e08e724db6fa12fb5f847"
            ),
            _bfcl(
                "multi_turn_func_doc/posting_api", "87f9fc404a06e4107d7c366f1399c596440e84c16cb119faf374b2f532d86e8b"
            ),
            _bfcl("multi_turn_func_doc/ticket_api", "31324e0380782664fe82ba05bd23517808ad55692b45a5fe7c3d4d395fe4f0f8"),
            _bfcl(
                "multi_turn_func_doc/trading_bot", "1a7933fd8f0cb8fbec38aeae05cb8c24132747cad4904fe1c13ac3d01fc22c2d"
            ),
            _bfcl(
                "multi_turn_func_doc/travel_booking", "f17b950c13adddf41d0848077df58788252e4c2e7cad5cfa71c8c4bf04f57b26"
            ),
            _bfcl(
                "multi_turn_func_doc/vehicle_control",
                "0c8a66292844874ef7b168f343bc394d8615d2d9e1f4387999a9ee23011eac78",
            ),
            _bfcl(
                "possible_answer/BFCL_v4_multi_turn_base",
                "1fee67823b317571649177dd89d63969feaae4e810cc7448ee55ba797fb7c8fc",
            ),
            _bfcl(
                "possible_answer/BFCL_v4_multiple", "244e00ce9395df948bcafc7bee64e8f9c87ef70887587d83cae45b13699f3047"
            ),
            _bfcl(
                "possible_answer/BFCL_v4_parallel", "8a6aa19c1adddc6a5a2f7e40f9dbf30cc7e95815e7b830c90589ab318229e0f0"
            ),
            _bfcl(
                "possible_answer/BFCL_v4_simple_python",
                "90cd5bc653690ee8e459b5b3f3fc9458606f7f3fcbf795bb51b7dc581f8c86dc",
            ),
        ),
    ),
    PublicRows(
        "tau_bench",
        ("tau_bench",),
        "200",
        "MIT",
        "sierra-research/tau-bench",
        "59a200c6d575d595120f1cb70fea53cef0632f6b",
        (
            PublicFile(
                "tau_bench/gpt-4o-airline.json",
                "historical_trajectories/gpt-4o-airline.json",
                "e9e6c0297660c537f83d4fd9c476ce7a9a86ecd2784874b7bfc13be598e37bfa",
            ),
        ),
    ),
    PublicRows(
        "sycophancy",
        ("biographies",),
        "5100 + 5100",
        "CC-BY-4.0",
        "anthropics/evals",
        "1f7792552fb0d6b8add83ff84f988edd043abec8",
        (
            _typology("conservative", "e75270badc2a4407817d9a428168163286050def4c9ad1865d06afa9e54b2a7b"),
            _typology("liberal", "e18c4cb9f1e0c7920449e0a2e11f827e91b495a11e1a2ca7e5d24b1cbb5e5b48"),
        ),
    ),
)
