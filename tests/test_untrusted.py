"""A checkpoint is a stranger's: none of its code runs, its template ends, its manifest speaks of its own files only."""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import CHATML, byte_tokenizer
from safetensors.torch import load_file, save_file
from test_cli import refused, refused_model

from kvaudit.audit.engines.exports.llama_cpp import export_gguf
from kvaudit.audit.sampling import model, rendering
from kvaudit.audit.sampling.chat import Chat
from kvaudit.audit.sampling.model import load_model, verify_folder
from kvaudit.audit.sampling.rendering import renderer
from kvaudit.audit.sampling.weights import INDEX, file_sha256
from kvaudit.core.errors import DataError, RunError, SpecError
from kvaudit.core.files import write_output
from kvaudit.core.provenance import check_checkpoint
from kvaudit.core.records import Message, Role

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # sha256 of no bytes
USER = Message(Role.USER, "Hello.")


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_folder, tmp_path / "model")
    return tmp_path / "model"


def rewritten(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))


def with_code(folder: Path) -> Path:
    """Code that a checkpoint brings; returns the file that appears when it is run."""
    ran = folder.parent / "ran"
    (folder / "evil.py").write_text(
        f"open({str(ran)!r}, 'w').close()\nclass Config: pass\nModel = Tokenizer = Config\n"
    )
    return ran


CODE = pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}),
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}),
        ("config.json", {"text_config": {"auto_map": {"AutoModel": "evil.Model"}}}),
        ("tokenizer_config.json", {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Tokenizer"]}}),
        ("tokenizer_config.json", {"tokenizer_class": "Evil", "auto_map": ["evil.Tokenizer", None]}),
    ],
)


@CODE
def test_code_of_a_checkpoint_is_refused_even_if_stdin_says_yes(
    name: str, changes: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = with_code(folder)
    rewritten(folder / name, **changes)
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # `yes |`
    with pytest.raises(DataError, match=rf"{name} names Python code \(auto_map\), which is never run") as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)
    assert not ran.exists()
    assert "evil" not in sys.modules


@CODE
def test_transformers_is_told_to_run_no_code(
    name: str, changes: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second line of defence: what the first would miss is not asked for on stdin either."""
    ran = with_code(folder)
    rewritten(folder / name, **changes)
    monkeypatch.setattr(model, "check_no_code", lambda _: None)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with suppress(DataError):
        load_model(str(folder))
    assert not ran.exists()


def test_code_beside_a_gguf_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    rewritten(tmp_path / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.Tokenizer"]})
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(DataError, match="names Python code"):
        load_model(str(tmp_path / "model.gguf"))


def test_an_empty_auto_map_is_no_code(folder: Path) -> None:
    rewritten(folder / "config.json", auto_map={})
    assert load_model(str(folder)).max_positions == 4096


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/hostname", "a/../../outside.bin", ""])
def test_a_manifest_entry_outside_its_folder_is_refused(name: str, folder: Path) -> None:
    (folder.parent / "outside.bin").write_bytes(b"")
    (folder / "manifest.json").write_text(json.dumps({name: EMPTY}))
    with pytest.raises(DataError, match=r"manifest\.json' lists .*, no file of that folder"):
        verify_folder(folder)


def sharded(folder: Path, *shards: str, named: str | None = None) -> None:
    """The weights under these names, each tensor in every shard; the index names one of them, or ``named``."""
    whole = folder / "model.safetensors"
    names = list(load_file(whole))
    for shard in shards:
        shutil.copy(whole, folder / shard)
    whole.unlink()
    weight_map = {name: shards[0] if named is None else named for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/dev/zero", "a/b.safetensors", "none.safetensors", "", 1])
def test_an_index_names_files_of_its_folder_only(name: Any, folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    sharded(folder, "a.safetensors", named=name)
    with pytest.raises(DataError, match=r"names .*, no \.safetensors file of that folder"):
        load_model(str(folder))


@pytest.mark.parametrize("text", ["[1]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_an_index_without_a_map_is_one_line(text: str, folder: Path) -> None:
    sharded(folder, "a.safetensors")
    (folder / INDEX).write_text(text)
    assert INDEX in refused_model(folder)


def test_weights_are_identified_by_the_shards_that_the_index_names(folder: Path) -> None:
    whole = file_sha256(folder / "model.safetensors")
    sharded(folder, "a.safetensors", "b.safetensors")
    (folder / "b.safetensors").write_bytes(b"")  # would not load
    loaded = load_model(str(folder))
    assert loaded.sha256 == whole
    assert loaded.files[INDEX] == file_sha256(folder / INDEX)


def test_one_file_of_weights_goes_before_an_index(folder: Path) -> None:
    (folder / INDEX).write_text("[1]")
    (folder / "other.safetensors").write_bytes(b"")
    assert load_model(str(folder)).sha256 == file_sha256(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["adapter_config.json", "shard-00001-model-00001-of-00001.safetensors"])
def test_files_that_would_bring_other_weights_are_refused(name: str, folder: Path) -> None:
    (folder / name).write_text("{}")
    assert f"{name} is " in refused_model(folder)


def test_a_config_that_names_other_weights_is_refused(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    rewritten(folder / "config.json", transformers_weights="other.safetensors")
    assert "config.json names other weights" in refused_model(folder)


def with_tensors(folder: Path, **changes: Any) -> Path:
    """The weights with some tensors replaced, or left out where the change is None."""
    weights = folder / "model.safetensors"
    tensors = {**load_file(weights), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, weights, metadata={"format": "pt"})
    return folder


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (None, f"its weights lack {NORM};"),
        (torch.ones(31), f"{NORM} has shape (31,), its config wants (32,);"),
        (torch.full((32,), float("nan")), f"{NORM} holds NaN or infinity"),
        (torch.full((32,), float("-inf")), f"{NORM} holds NaN or infinity"),
        (torch.ones(32, dtype=torch.int32), f"{NORM} is of type I32, weights are floats"),
        (torch.ones(32, dtype=torch.complex64), f"{NORM} is of type C64, weights are floats"),
    ],
    ids=["missing", "shape", "nan", "inf", "integer", "complex"],
)
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_a_tensor_that_is_no_weight_is_refused_by_name(tensor: Any, said: str, folder: Path) -> None:
    assert said in refused_model(with_tensors(folder, **{NORM: tensor}))


@pytest.mark.parametrize(
    ("layers", "said"), [(3, r"its weights lack model\.layers\.2\..* and 8 more"), (1, r"leaves out .* and 8 more")]
)
def test_a_config_of_more_or_fewer_layers_is_refused(layers: int, said: str, folder: Path) -> None:
    rewritten(folder / "config.json", num_hidden_layers=layers)
    with pytest.raises(DataError, match=said):
        load_model(str(folder))


VALUES = "model.layers.1.self_attn.v_proj"


@pytest.mark.parametrize(
    "name",
    [
        f"{VALUES}.bias",  # of a config without attention_bias
        f"{VALUES}.lora_A.default.weight",
        f"{VALUES.removeprefix('model.')}.lora_B.default.weight",  # of a checkpoint saved without its head
        f"{VALUES}.weight_scale",
        "model.layers.1.self_attn.k_norm.weight",  # of another architecture
        "model.norm.bias",
        "lm_head.bias",
    ],
)
def test_a_tensor_that_would_change_a_module_of_the_model_is_refused(name: str, folder: Path) -> None:
    said = refused_model(with_tensors(folder, **{name: torch.ones(16)}))
    assert f"its config has no place for {name}, without which the model computes something else" in said


def test_modules_that_a_model_lacks_are_left_out_and_noted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("model.visual.blocks.0.attn.qkv.bias", "mtp.layers.0.self_attn.q_proj.weight", "score.weight")
    load_model(str(with_tensors(folder, **{name: torch.ones(2) for name in names})))
    noted = "not loaded, because the model has no such module: model.visual, mtp, score\n"
    assert capsys.readouterr().err.endswith(noted)


OLD_BUFFERS = {
    "attention.bias": torch.ones(1, 1, 8, 8),
    "attention.masked_bias": torch.tensor(-1e9),
    "attention.rotary_emb.inv_freq": torch.ones(4),
}


@pytest.mark.parametrize(
    ("kind", "sizes", "layer", "extra"),
    [
        ("Qwen2", {}, "model.layers.0.", {"self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        ("Gemma2", {"head_dim": 8}, "model.layers.0.", {}),
        ("Gemma3Text", {"head_dim": 8}, "model.layers.0.", {}),
        ("GPTNeoX", {}, "gpt_neox.layers.0.", OLD_BUFFERS),
        ("GPT2", {}, "h.0.", {"attn.bias": torch.ones(1, 1, 8, 8), "attn.masked_bias": torch.tensor(-1e9)}),
        ("Mixtral", {"num_local_experts": 2}, "model.layers.0.", {}),
    ],
)
def test_saved_models_of_other_families_load_with_the_buffers_of_old_versions(
    kind: str, sizes: dict[str, int], layer: str, extra: dict[str, Any], folder: Path
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **sizes}
    config = getattr(transformers, f"{kind}Config")(vocab_size=259, num_key_value_heads=2, pad_token_id=0, **sizes)
    made = transformers.AutoModelForCausalLM.from_config(config)
    made.save_pretrained(folder)
    with_tensors(folder, **{layer + name: tensor for name, tensor in extra.items()})
    found = model._load_folder(folder, "float32")[0].state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in made.state_dict().items())


def test_a_gguf_file_that_lacks_a_tensor_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers reports of such a file; reading one takes a package that the tests do without."""
    (folder / "model.gguf").write_bytes(b"GGUF")
    parts = (
        load_model(str(folder)).model,
        {"missing_keys": {NORM}, "mismatched_keys": set(), "unexpected_keys": set()},
    )
    monkeypatch.setattr(model, "check_gguf", lambda _: None)
    monkeypatch.setattr(
        model.AutoModelForCausalLM,
        "from_pretrained",
        lambda *_, output_loading_info=False, **__: parts if output_loading_info else parts[0],
    )
    monkeypatch.setattr(model.AutoTokenizer, "from_pretrained", lambda *_, **__: byte_tokenizer())
    with pytest.raises(DataError, match=f"its weights lack {NORM}"):
        load_model(str(folder / "model.gguf"))


@pytest.mark.parametrize(("kind", "is_dropped"), [("Llama", True), ("Qwen2", False)])
def test_a_gguf_file_with_biases_that_transformers_drops_is_refused(
    kind: str, is_dropped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(vocab_size=259, num_key_value_heads=2, attention_bias=True, **sizes)
    export_gguf(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    monkeypatch.setattr(model, "_gguf_tokenizer", lambda _: byte_tokenizer())
    if is_dropped:
        with pytest.raises(DataError, match=r"has 8 biases, such as blk\.0\.attn_q\.bias, transformers loads 0"):
            load_model(str(tmp_path / "model.gguf"))
    else:
        assert load_model(str(tmp_path / "model.gguf")).model.model.layers[0].self_attn.q_proj.bias is not None


def test_a_tied_head_is_not_missing(folder: Path) -> None:
    rewritten(folder / "config.json", tie_word_embeddings=True)
    model = load_model(str(with_tensors(folder, **{"lm_head.weight": None}))).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_buffers_of_old_checkpoints_are_no_weights_of_another_model(folder: Path) -> None:
    with_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert load_model(str(folder)).max_positions == 4096


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_hidden_layers", 100_000, "asks for num_hidden_layers 100000, its weights have 21 tensors"),
        ("hidden_size", 10**9, "asks for hidden_size 1000000000, its weights have"),
        ("num_hidden_layers", "x", "Field 'num_hidden_layers' expected int, got str"),
        ("num_attention_heads", 0, "integer modulo by zero"),
        ("dtype", ["a"], "list index out of range"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "requires"),
    ],
)
def test_a_config_that_no_model_has_is_one_line(key: str, value: Any, said: str, folder: Path) -> None:
    rewritten(folder / "config.json", **{key: value})
    assert said in refused_model(folder)


@pytest.mark.parametrize("stop", [True, -3, "<|im_end|>", 1.5, 10**30, 259, [1, True], [[1]], {"a": 1}])
def test_a_stop_that_is_no_token_of_the_model_is_refused(stop: Any, folder: Path) -> None:
    rewritten(folder / "generation_config.json", eos_token_id=stop)
    message = refused_model(folder)
    assert "expected a token of the model, 0 to 258; correct generation_config.json" in message


def test_a_tokenizer_that_ends_with_a_token_the_model_lacks_is_refused(folder: Path) -> None:
    rewritten(folder / "tokenizer_config.json", eos_token="<|over|>")
    assert "eos_token '<|over|>' is token 259, the model has tokens 0 to 258" in refused_model(folder)


@pytest.mark.parametrize("table", ["files", "ledgers"])
def test_a_finished_checkpoint_lists_its_own_files_only(table: str, tmp_path: Path) -> None:
    (tmp_path / "outside.bin").write_bytes(b"")
    (tmp_path / "checkpoint").mkdir()
    tables = {"files": {}, "ledgers": {}, table: {"../../outside.bin": EMPTY, "../outside.bin": EMPTY}}
    (tmp_path / "checkpoint" / "provenance.json").write_text(json.dumps(tables))
    with pytest.raises(DataError, match=r"provenance\.json' lists .*, no file of that folder"):
        check_checkpoint(tmp_path / "checkpoint")


@pytest.mark.parametrize("command", [("gate", "--pin"), ("replay", "verify")])
def test_a_run_s_folder_is_no_checkpoint(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text(json.dumps({"format": 1, "name": "probe"}))
    assert "is no finished checkpoint; give the folder of one, such as RUN/checkpoints" in refused(*command, tmp_path)


BOMBS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a string times": "{{ 'a' * 99999999999 }}",
    "a width": "{{ '{:>99999999999}'.format(1) }}",
    "twice as long": "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "a long text": "{{ 'a' * 20000000 }}",
}


# each ends a process of its own: one by its time, one by its memory; the template of the next test by its length
BY_TIME_OR_MEMORY = ("nested loops", "a string times")


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in BY_TIME_OR_MEMORY)) for one in BOMBS]
)
def test_a_template_without_end_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="the chat template takes more than 2 s, 512 MB or 16 million characters"):
        Chat(byte_tokenizer(CHATML + BOMBS[name]))
    assert Chat(byte_tokenizer()).system_role == "native"  # the next template finds a process that works


def test_a_template_that_waits_for_a_real_conversation_is_refused_in_one_line(folder: Path) -> None:
    late = "{% if messages[-1]['content']|length > 300 %}" + BOMBS["a long text"] + "{% endif %}"
    (folder / "chat_template.jinja").write_text(CHATML + late)
    assert "the chat template takes more than" in refused_model(folder)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{% for i in range(9999999) %}{% endfor %}", "Range too big"),
        ("{% for %}", "Expected an expression"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe"),
    ],
)
def test_what_a_template_raises_is_one_line(template: str, said: str) -> None:
    with pytest.raises(SpecError, match=r"the chat template refuses messages of roles user.*: ") as caught:
        Chat(byte_tokenizer(CHATML + template))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_templates_by_name_without_a_default_are_one_line() -> None:
    with pytest.raises(SpecError, match="chat template cannot be chosen"):
        Chat(byte_tokenizer({"rag": CHATML}))


def test_a_conversation_is_rendered_as_transformers_renders_it() -> None:
    tokenizer = byte_tokenizer("{{ eos_token }}" + CHATML)
    rows = [{"role": "user", "content": "Hé 你好 \U0001f600 <|im_end|>"}]
    wanted = tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True)
    assert Chat(tokenizer)._apply(rows) == wanted


def test_a_rendering_process_that_was_killed_is_one_line_and_the_next_is_a_new_one() -> None:
    chat = Chat(byte_tokenizer())
    renderer._process.kill()
    renderer._process.wait()
    new = [Message(Role.USER, "Nobody has said this yet.")]
    with pytest.raises(RunError, match="renders chat templates ended with code -9"):
        chat.prompt(new)
    assert chat.prompt(new).ids


def test_a_conversation_is_rendered_once_and_one_that_tells_the_time_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, asked, answer = rendering.Renderer(), [], rendering.Renderer._answer
    monkeypatch.setattr(rendering.Renderer, "_answer", lambda *a: asked.append(a) or answer(*a))
    monkeypatch.setattr(rendering, "_CACHE_BYTES", sys.getsizeof("twice1") + rendering._ENTRY)
    rows = [{"role": "user", "content": "."}]
    rendered = [own.render("twice{{ n }}", rows, {"n": n}) for n in (1, 1, 2, 1)]
    assert rendered == ["twice1", "twice1", "twice2", "twice1"]
    assert len(asked) == 3  # two texts are more than are kept, so the first was forgotten
    assert len(own._texts) == 1
    assert {own.render("{{ strftime_now('%Y') }}", rows, {})[:2] for _ in range(2)} == {"20"}
    assert {own.render("{{ [1, 2] | random }}", rows, {}) in "12" for _ in range(2)} == {True}
    assert len(asked) == 7
    own.end()


def test_an_interrupted_conversation_is_not_taken_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat(byte_tokenizer())
    wanted = chat.prompt([Message(Role.USER, "Two.")])

    send = rendering._send

    def interrupted(*words: Any) -> None:
        send(*words)
        raise KeyboardInterrupt

    monkeypatch.setattr(rendering, "_send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chat.prompt([Message(Role.USER, "One.")])
    monkeypatch.undo()
    assert chat.prompt([Message(Role.USER, "Two.")]) == wanted


def test_a_file_that_cannot_take_its_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "pin.json").mkdir()
    with pytest.raises(RunError, match="a folder, a pipe or a device"):
        write_output(tmp_path / "pin.json", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["pin.json"]


def test_an_output_is_written_through_a_link_and_never_over_a_device_or_a_read_only_file(tmp_path: Path) -> None:
    real, link, pipe = (tmp_path / name for name in ("real.md", "link.md", "pipe"))
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_output(link, "new")
    assert link.is_symlink()
    assert (real.read_text(), real.stat().st_mode & 0o777) == ("new", 0o640)
    os.mkfifo(pipe)
    real.chmod(0o440)
    for path, kind in ((pipe, "a folder, a pipe or a device"), (real, "read-only"), (link, "read-only")):
        with pytest.raises(RunError, match=f"cannot write .*, which is {kind}; give another path"):
            write_output(path, "newer")
    assert pipe.is_fifo()
    assert real.read_text() == "new"
