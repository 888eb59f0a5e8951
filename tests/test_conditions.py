"""Conditions by their text: what each is compared with, and a short name by rule; in a spec, with what it completes."""

import json
from typing import Any

import pytest
import yaml

from kvaudit.audit.runs.names import NAMES
from kvaudit.core.errors import SpecError
from kvaudit.core.policy_names import compressed_policies, condition_names, reference_of
from kvaudit.core.spec import RunSpec, parse_spec

F32, U4, U8 = (f"openvino:INFERENCE_PRECISION_HINT=f32,KV_CACHE_PRECISION={kind}" for kind in ("f32", "u4", "u8"))
APART = "openvino:INFERENCE_PRECISION_HINT=f32,KEY_CACHE_PRECISION=u8,VALUE_CACHE_PRECISION=u4"
_APART = "KEY_CACHE_PRECISION=u4,VALUE_CACHE_PRECISION=u8"
AUTO, E5M2 = "vllm:kv_cache_dtype=auto", "vllm:kv_cache_dtype=fp8_e5m2"
F16, Q4 = "llama.cpp:type_k=f16,type_v=f16", "llama.cpp:type_k=q8_0,type_v=q4_0"


def test_conditions_that_differ_in_one_setting_are_named_by_its_value() -> None:
    assert condition_names({U4: F32, U8: F32, E5M2: AUTO}) == {
        U4: "openvino u4",
        U8: "openvino u8",
        F32: "openvino f32",
        E5M2: "vllm fp8_e5m2",
        AUTO: "vllm auto",
    }


def test_several_settings_are_named_without_the_words_they_share() -> None:
    names = condition_names({U4: F32, APART: F32, Q4: F16})
    assert names == {
        U4: "openvino u4",
        APART: "openvino KEY=u8 VALUE=u4",
        F32: "openvino f32",
        Q4: "llama.cpp k=q8_0 v=q4_0",
        F16: "llama.cpp k=f16 v=f16",
    }


def test_constants_of_an_engine_stand_without_a_name_where_no_other_setting_has_them() -> None:
    token, whole = (f"openvino:{keys},KEY_CACHE_QUANT_MODE=BY_TOKEN" for keys in (_APART, "KV_CACHE_PRECISION=u4"))
    names = condition_names({token: F32, whole: F32})
    assert list(names.values())[:2] == ["openvino KEY=u4 VALUE=u8 BY_TOKEN", "openvino u4 BY_TOKEN"]
    twice = "openvino:a_k=BY_TOKEN,a_v=BY_TOKEN,b=BF16"
    assert condition_names({twice: F32})[twice] == "openvino a_k=BY_TOKEN a_v=BY_TOKEN b=BF16"


def test_a_condition_that_sets_nothing_is_as_the_engine_comes() -> None:
    names = condition_names({"sglang": "sglang:kv_cache_dtype=auto"})
    assert names == {"sglang": "sglang as it comes", "sglang:kv_cache_dtype=auto": "sglang auto"}


def test_no_two_conditions_have_one_name() -> None:
    odd = {"e:a=x": "e:a=z", "e:a=x%20b%3Dy": "e:a=z", "e:a=x,b=y": "e:a=z"}
    assert set(condition_names(odd).values()) == {"e x", "e x b=y", "e a=x b=y", "e z"}
    hinted = {"e:h=1,a=x": "e:h=1,a=z", "e:h=2,a=x": "e:h=2,a=z"}
    assert list(condition_names(hinted).values()) == ["e x 1", "e x 2", "e z 1", "e z 2"]
    long = {f"e:{n}=1,{'a' * 60}=x": "e:z=1" for n in "bc"}
    assert len(set(condition_names(long).values())) == 3


def test_a_name_is_one_short_line_whatever_a_setting_holds() -> None:
    name = condition_names({f"e:a=x%0A%1B[31m{'y' * 500}": "e:a=z"})[f"e:a=x%0A%1B[31m{'y' * 500}"]
    assert "\n" not in name
    assert "\x1b" not in name
    assert len(name) < 120


def test_each_is_compared_with_the_one_that_its_spec_names() -> None:
    references = {U4: F32, Q4: F16}
    assert [reference_of(text, references) for text in (U4, Q4, F32, "snapkv:budget=9")] == [F32, F16, F32, "none"]
    assert compressed_policies(["none", U4, F32, Q4, F16, "int8"], references) == (U4, Q4, "int8")


# --- in a spec -------------------------------------------------------------------------------------------------------

OV_U4, OV_F32 = (f"{text},cache_size=2" for text in (U4, F32))


TRAIN = {
    **{"arms": ["dense", "naive"], "policy": "int8", "suites": ["refusal"]},
    **{"context_tokens": 128, "steps": 1, "seeds": [1]},
}


def served(*policies: Any, own_policy_only: bool = False, **sections: Any) -> RunSpec:
    """A spec of nothing but ways of serving."""
    grid = {"policies": list(policies), "suites": {"refusal": {"items": 96}}, "context_tokens": [128], "pilot": 0}
    grid |= {"own_policy_only": True} if own_policy_only else {}
    return parse_spec(json.dumps({"name": "x", "evaluate": grid, **sections}), "spec", NAMES)


def openvino(kind: str, **others: Any) -> dict[str, Any]:
    return {"engine": "openvino", "KV_CACHE_PRECISION": kind, **others}


ALONE = [
    [openvino("f32")],
    [openvino("f32"), "none"],
    [openvino("u4"), openvino("f32", cache_size=3)],
    [openvino("u4"), openvino("f32"), openvino("u8")],
    [openvino("f32", reference={"KV_CACHE_PRECISION": "f32"})],
    [openvino("u4", reference="openvino:INFERENCE_PRECISION_HINT=bf16,KV_CACHE_PRECISION=bf16")],
    [
        {
            "engine": "endpoint",
            "base_url": "http://h/v1",
            "model": "m",
            "reference": {"base_url": "http://h/v1", "model": "m"},
        }
    ],
]


@pytest.mark.parametrize("policies", ALONE, ids=str)
def test_a_complete_spec_reads_back_as_it_is(policies: list[Any]) -> None:
    spec = served(*policies)
    again = parse_spec(yaml.safe_dump(spec.written()), "kept", NAMES)
    assert again.evaluate.policies == spec.evaluate.policies
    assert again.evaluate.references == spec.evaluate.references
    assert again.sha256 == spec.sha256


def test_an_uncompressed_condition_can_be_gated() -> None:
    spec = served(openvino("u4"), train=TRAIN, gate={"primary": ["openvino:KV_CACHE_PRECISION=f32"]})
    assert spec.gate.primary == (OV_F32,)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (
            openvino("u4", reference={"engine": "vllm", "KV_CACHE_PRECISION": "f32"}),
            "the reference must use the same engine",
        ),
        (openvino("u4", reference="transformers"), "give settings of openvino"),
        (openvino("u4", reference="none"), "the reference must use the same engine"),
        (openvino("u4", reference="openvino:KEY_CACHE_PRECISION=f32"), r"compresses \(VALUE_CACHE_PRECISION\)"),
        (
            {"engine": "kvaudit", "policy": "int8", "reference": "none"},
            "a policy of kvaudit's own cache takes none; remove it",
        ),
        (openvino("u4", x="ü" * 400), "settings of 24.. characters with defaults filled in, the limit is 2000"),
        (openvino("u4", **{name: "x" * 500 for name in "abcd"}), "the limit is 2000"),
    ],
)
def test_an_impossible_reference_or_condition_is_refused(policy: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        served(policy, "none")


def test_what_openvino_chooses_for_values_where_keys_alone_are_named_is_written_out() -> None:
    found = served({"engine": "openvino", "KEY_CACHE_PRECISION": "f32"}).gate.primary
    assert found == (
        "openvino:INFERENCE_PRECISION_HINT=f32,KEY_CACHE_PRECISION=f32,VALUE_CACHE_PRECISION=u8,cache_size=2",
    )


def test_checkpoints_under_their_own_policies_alone_meet_no_engine() -> None:
    with pytest.raises(SpecError, match=r"own_policy_only cannot serve a trained checkpoint by an engine \(openvino:"):
        served("none", "int8", openvino("u4"), train=TRAIN, own_policy_only=True)
