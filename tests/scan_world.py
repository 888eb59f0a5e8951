"""Configurations as people write them, with what is planted in them: ``«rule»`` ends the line where its key stands.

The marks are taken out before a file is written. No file is anybody's: they are modelled on the examples that the
projects publish.
"""

from __future__ import annotations

import re
from pathlib import Path

_MARK = re.compile(r"[ \t]*«([^«»]+)»")

PLANTED = {
    "serving/trt.sh": """
#!/bin/bash
trtllm-serve org/model --backend pytorch --kv_cache_dtype fp8 «tensorrt-llm.kv-cache-dtype-flag»
""",
    "serving/omlx/model_settings.json": """
{
  "omlx": {"turboquantKvEnabled": true} «mlx.turboquant-kv»
}
""",
    "rl/sky.sh": """
uv run -m skyrl.train.entrypoints.main_base \\
  trainer.algorithm.off_policy_correction.tis_ratio_type=token «skyrl.off-policy-correction»
""",
    "rl/areal.yaml": """
actor:
  use_decoupled_loss: true «areal.decoupled-loss»
""",
    "rl/swift.sh": """
swift rlhf --rlhf_type grpo --rollout_importance_sampling_mode token_truncate «swift.rollout-importance-sampling»
""",
    "rl/openrlhf.sh": """
python -m openrlhf.cli.train_ppo_ray --enable_vllm_is_correction «openrlhf.vllm-is-correction»
""",
    "serving/vllm.sh": r"""
#!/bin/bash
# vllm serve was tried with --kv-cache-dtype fp8 first
set -e
MODEL=Qwen/Qwen3-8B
exec vllm serve "$MODEL" \
    --tensor-parallel-size 2 \
    --kv-cache-dtype fp8_e5m2 \ «vllm.kv-cache-dtype»
    --kv-offloading-size 32 \ «vllm.kv-offloading»
    --hf-overrides '{"sliding_window": 4096}' «vllm.hf-overrides-window»
""",
    "serving/vllm_config.yaml": """
# vllm serve --config
model: meta-llama/Llama-3.1-8B-Instruct
max-model-len: 32768
kv-cache-dtype: fp8 «vllm.kv-cache-dtype»
""",
    "deploy/k8s/vllm-deployment.yaml": """
apiVersion: apps/v1
kind: Deployment
metadata: {name: llama}
spec:
  template:
    spec:
      containers:
      - name: engine
        image: vllm/vllm-openai:v0.20.1
        args:
        - --model
        - meta-llama/Llama-3.1-70B-Instruct
        - --kv-cache-dtype «vllm.kv-cache-dtype»
        - int8_per_token_head
        - --kv-transfer-config «vllm.offloading-connector»
        - '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'
        env:
        - name: LMCACHE_REMOTE_SERDE «lmcache.cachegen»
          value: cachegen
""",
    "deploy/docker-compose.yml": """
x-engine: &engine
  image: ghcr.io/ggml-org/llama.cpp:server-cuda
  restart: always
services:
  small:
    <<: *engine
    command: >
      llama-server -m /models/small.gguf
      --cache-type-k q8_0 «llama.cpp.cache-type-k»
      -ctv q4_0 «llama.cpp.cache-type-v»
  large:
    <<: *engine
    environment:
      LLAMA_ARG_CONTEXT_SHIFT: "true" «llama.cpp.context-shift»
      LLAMA_ARG_CACHE_REUSE: 256 «llama.cpp.cache-reuse»
  ollama:
    image: ollama/ollama
    environment:
    - OLLAMA_FLASH_ATTENTION=1
    - OLLAMA_KV_CACHE_TYPE=q8_0 «ollama.kv-cache-type»
""",
    "deploy/Dockerfile.sglang": r"""
FROM lmsysorg/sglang:v0.5.23
ENV SGLANG_LOGGING=1
# the port is the balancer's
EXPOSE 30000
CMD ["python3", "-m", "sglang.launch_server", \
     "--model-path", "/model", \
     # cheap
     "--kv-cache-dtype", "fp8_e4m3", \ «sglang.kv-cache-dtype»
     "--enable-hierarchical-cache", \ «sglang.hierarchical-cache»
     "--allow-auto-truncate"] «sglang.auto-truncate»
""",
    "deploy/Dockerfile": r"""
FROM ghcr.io/ggml-org/llama.cpp:server
ENV LLAMA_ARG_CACHE_TYPE_K=q4_0 LLAMA_ARG_PORT=8080 «llama.cpp.cache-type-k»
ENTRYPOINT llama-server --context-shift --keep 128 «llama.cpp.context-shift»
""",
    "serving/sglang_glm.sh": r"""
python -m sglang.launch_server --model-path zai-org/GLM-5 \
  --disaggregation-mode decode --disable-radix-cache \
  --enable-hisparse --hisparse-config '{"top_k": 2048}' «sglang.hisparse»
""",
    "serving/trtllm/extra_config.yaml": """
# trtllm-serve --config
kv_cache_config:
  free_gpu_memory_fraction: 0.85
  dtype: fp8 «tensorrt-llm.kv-cache-dtype»
  max_attention_window: [2048, 2048] «tensorrt-llm.attention-window»
  sink_token_length: 4
  host_cache_size: 8589934592 «tensorrt-llm.host-cache»
sparse_attention_config:
  algorithm: rocket «tensorrt-llm.rocket»
  prompt_budget: 2048
""",
    "serving/trtllm/tri.yaml": """
backend: pytorch
kv_cache_compression_config:
  algorithm: triattention «tensorrt-llm.triattention»
  budget: 1024
  beta: 64
  calibration_path: /calibration/qwen3.pt
""",
    "serving/trtllm/skip.yaml": """
sparse_attention_config:
  algorithm: skip_softmax «tensorrt-llm.skip-softmax»
  threshold_scale_factor: {prefill: 1000.0, decode: 500.0}
""",
    "serving/trtllm_llm.py": '''
"""Serve with TensorRT-LLM; --kv-cache-dtype fp8 is not a flag of this script."""
from tensorrt_llm import LLM
from tensorrt_llm.llmapi import (
    ColdPageQuantizationCompressionConfig, KvCacheConfig, QuantConfig, RocketSparseAttentionConfig,
    SkipSoftmaxAttentionConfig, TriAttentionKvCacheCompressionConfig,
)

llm = LLM(
    model="x",
    kv_cache_config=KvCacheConfig(
        enable_block_reuse=False,
        dtype="fp8", «tensorrt-llm.kv-cache-dtype»
        max_attention_window=[4096], «tensorrt-llm.attention-window»
    ),
    quant_config=QuantConfig(kv_cache_quant_algo=QuantAlgo.FP8), «tensorrt-llm.kv-cache-quant-algo»
    sparse_attention_config=RocketSparseAttentionConfig(prompt_budget=2048), «tensorrt-llm.rocket-call»
)
tri = LLM(model="x", kv_cache_compression_config=TriAttentionKvCacheCompressionConfig( «tensorrt-llm.triattention-call»
    budget=2048, beta=128, calibration_path="c.pt"))
cold = ColdPageQuantizationCompressionConfig(quant="nvfp4") «tensorrt-llm.cold-page-quantisation»
skip = SkipSoftmaxAttentionConfig(target_sparsity=0.5) «tensorrt-llm.skip-softmax-call»
''',
    "models/fp8-kv/config.json": """
{
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "quantization_config": {
    "quant_method": "compressed-tensors",
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"} «transformers.kv-cache-scheme»
  }
}
""",
    "models/modelopt/hf_quant_config.json": """
{
  "producer": {"name": "modelopt"},
  "quantization": {
    "quant_algo": "FP8",
    "kv_cache_quant_algo": "FP8" «tensorrt-llm.kv-cache-quant-algo»
  }
}
""",
    "models/gemma/config.json": """
{
\t"model_type": "gemma3_text",
\t"layer_types": ["sliding_attention", "full_attention"], «transformers.layer-types»
\t"sliding_window": 1024 «transformers.sliding-window»
}
""",
    "models/llama4/config.json": """
{"model_type": "llama4", "text_config": {
  "attention_chunk_size": 8192 «transformers.attention-chunk»
}}
""",
    "models/deepseek/config.json": """
{"model_type": "deepseek_v32",
 "index_topk": 2048} «transformers.index-topk»
""",
    "models/quantised/generation_config.json": """
{
  "temperature": 0.6,
  "cache_implementation": "quantized" «transformers.cache-implementation»
}
""",
    "serving/hf_chat.py": """
from transformers import AutoModelForCausalLM, QuantizedCache

cache = QuantizedCache(backend="quanto", config=config, nbits=4) «transformers.quantized-cache»
config = model.generation_config
config.cache_implementation = "offloaded" «transformers.offloaded-cache»
""",
    "serving/llama.py": """
from llama_cpp import Llama
llm = Llama(model_path="m.gguf", type_k=8, «llama.cpp.cache-type-k»
            type_v=8) «llama.cpp.cache-type-v»
full = Llama(model_path="m.gguf", type_k=1, type_v=1)
""",
    "serving/lmcache.yaml": """
chunk_size: 256
local_cpu: true
remote_url: "redis://localhost:6379"
remote_serde: "cachegen" «lmcache.cachegen»
enable_blending: true «lmcache.blending»
""",
    "serving/vllm_offline.py": """
import os
from vllm import LLM
from vllm.config import CacheConfig, KVTransferConfig

DTYPE = "fp8"
os.environ["LMCACHE_REMOTE_SERDE"] = "cachegen" «lmcache.cachegen»
transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both") «vllm.offloading-connector»
llm = LLM(model="x", max_model_len=4096,
          kv_cache_dtype=DTYPE) «vllm.kv-cache-dtype»
cache = CacheConfig(cache_dtype="fp8_e4m3") «vllm.cache-dtype»
""",
    "research/press.py": """
from kvpress import SnapKVPress, ThinKPress «kvpress.import»

press = SnapKVPress(compression_ratio=0.5) «kvpress.press»
thin = ThinKPress(key_channel_compression_ratio=0.3) «kvpress.think»
""",
    "research/evaluate_config.yaml": """
model: meta-llama/Meta-Llama-3.1-8B-Instruct
dataset: ruler
press_name: expected_attention «kvpress.press-name»
compression_ratio: 0.5
""",
    "verl/ppo.yaml": """
actor_rollout_ref:
  rollout:
    name: vllm
    calculate_log_probs: true
    engine_kwargs:
      vllm:
        kv_cache_dtype: fp8 «verl.vllm-kv-cache-dtype»
      sglang: {}
algorithm:
  rollout_correction:
    rollout_is: token «verl.rollout-is»
    rollout_is_threshold: 2.0
    rollout_rs: token_k1 «verl.rollout-rs»
""",
    "verl/run_dapo.sh": r"""
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.name=sglang \
    +actor_rollout_ref.rollout.engine_kwargs.sglang.kv_cache_dtype=fp8_e4m3 \ «verl.sglang-kv-cache-dtype»
    actor_rollout_ref.actor.tis_imp_ratio_cap=2.0 \ «verl.tis-cap»
    trainer.total_epochs=15 $@
""",
    "slime/run-qwen3.sh": r"""
#!/bin/bash
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-tis «slime.tis»
   --tis-clip 2.0
   # --use-opsm
)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-kv-cache-dtype fp8_e4m3 «slime.kv-cache-dtype»
   --sglang-enable-hierarchical-cache «slime.hierarchical-cache»
)
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="{\"env_vars\": {\"PYTHONPATH\": \"/root/Megatron-LM/\"}}" \
   -- python3 train.py ${GRPO_ARGS[@]} ${SGLANG_ARGS[@]}
""",
    "slime/run_glm.py": '''
"""slime in Python."""
import slime.utils.misc as U

sglang_args = (
    "--rollout-num-gpus-per-engine 8 "
    f"--sglang-mem-fraction-static {FRACTION} "
    "--sglang-kv-cache-dtype fp8_e5m2 " «slime.kv-cache-dtype»
)
grpo_args = "--advantage-estimator gspo --use-rollout-logprobs " «slime.rollout-logprobs»
''',
    "nemo_rl/grpo_fp8.yaml": """
defaults: grpo_math_1B.yaml
loss_fn:
  use_importance_sampling_correction: true «nemo-rl.importance-sampling»
policy:
  generation:
    backend: vllm
    vllm_cfg:
      precision: fp8
      kv_cache_dtype: fp8 «nemo-rl.vllm-kv-cache-dtype»
""",
    "nemo_rl/grpo_sglang.yaml": """
policy:
  generation:
    backend: sglang
    sglang_cfg:
      dtype: ${policy.precision}
      kv_cache_dtype: fp8_e4m3 «nemo-rl.sglang-kv-cache-dtype»
""",
    "prime_rl/rl.toml": '''
max_steps = 100
# kv_cache_dtype = "fp8"

[model]
name = "Qwen/Qwen3-4B"

[trainer.loss]
type = "default"
dppo_mask_high = 0.2 «prime-rl.dppo-mask»

[orchestrator]
note = """
kv_cache_dtype = "fp8"
"""

[inference.vllm]
model = "Qwen/Qwen3-4B"
kv_cache_dtype = "fp8_e4m3" «prime-rl.kv-cache-dtype»

[inference.kv_cache_offload] «prime-rl.kv-cache-offload»
type = "native"

[inference.kv_cache_offload.cpu]
num_bytes = 1000000000
''',
    "prime_rl/launch.sh": """
uv run rl @ rl.toml --trainer.loss.type ipo \\
  --trainer.loss.ipo_threshold 0.1 \\ «prime-rl.ipo»
  --inference.vllm.kv-cache-dtype fp8 «prime-rl.kv-cache-dtype»
""",
    "trl/serve.sh": """
CUDA_VISIBLE_DEVICES=0 trl vllm-serve --model Qwen/Qwen3-4B --kv_cache_dtype fp8 «trl.vllm-serve-kv-cache-dtype»
accelerate launch train_grpo.py --use_vllm true --vllm_importance_sampling_correction True «trl.importance-sampling»
""",
    "trl/train_grpo.py": """
from trl import GRPOConfig, RLOOConfig

args = GRPOConfig(
    output_dir="out",
    use_vllm=True, «trl.use-vllm»
)
rloo = RLOOConfig(
    cache_implementation="quantized", «trl.cache-implementation»
)
""",
    "open_instruct/grpo_fast.sh": r"""
for seed in 1 2; do
  python open_instruct/grpo_fast.py --seed $seed \
    --use_fp8_kv_cache \ «open-instruct.fp8-kv-cache»
    --truncated_importance_sampling_ratio_cap 2.0 «open-instruct.tis-cap»
done
""",
    "open_instruct/grpo_rho.sh": r"""
python open_instruct/grpo_fast.py --use_rho_correction --rho_mask_upper_bound 2.0 «open-instruct.rho»
""",
    "agents/langchain_agent.py": """
from langchain.agents import create_agent
from langchain.agents.middleware import ClearToolUsesEdit, ContextEditingMiddleware, SummarizationMiddleware

agent = create_agent(
    model="x",
    middleware=[
        SummarizationMiddleware(model="y", trigger=("tokens", 4000)), «langchain.summarisation»
        ContextEditingMiddleware( «langchain.context-editing»
            edits=[ClearToolUsesEdit(trigger=100000)]), «langchain.context-editing»
    ],
)
""",
    "agents/autogen_team.py": """
from autogen_core.model_context import BufferedChatCompletionContext
context = BufferedChatCompletionContext(buffer_size=5) «autogen.model-context»
""",
    "agents/lingua.py": """
from llmlingua import PromptCompressor

compressor = PromptCompressor("model")
short = compressor.compress_prompt(prompt, rate=0.33) «llmlingua.compress-prompt»
""",
    "agents/inspect_task.py": """
from inspect_ai.agent import react
from inspect_ai.model import CompactionSummary
solver = react(compaction=CompactionSummary(threshold=0.9)) «inspect.compaction»
""",
    "agents/openhands/config.toml": """
[core]
workspace_base = "./workspace"

[condenser]
type = "llm" «openhands.condenser»
keep_first = 1
""",
    "agents/openhands_sdk.py": """
from openhands.sdk.context.condenser import LLMSummarizingCondenser
condenser = LLMSummarizingCondenser(llm=llm, max_size=80, keep_first=4) «openhands.summarising-condenser»
""",
    "agents/claude_loop.py": """
import anthropic

client = anthropic.Anthropic()
response = client.beta.messages.create(
    model="x",
    context_management={
        "edits": [
            {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}}, «anthropic.context-edits»
        ]
    },
)
""",
    "agents/responses.py": """
from openai import OpenAI

OpenAI().responses.create(
    model="x",
    truncation="auto", «openai.truncation»
    context_management=[{"type": "compaction", "compact_threshold": 200000}], «openai.compaction»
)
""",
    "agents/codex/config.toml": """
# codex
model = "x"
model_auto_compact_token_limit = 190000 «codex.auto-compact»
""",
    "agents/gemini/settings.json": """
{
  // of the whole team
  "model": {
    "name": "gemini",
    "compressionThreshold": 0.3 «gemini-cli.compression»
  }
}
""",
    "ci/nightly.yaml": """
name: nightly
jobs:
  serve:
    runs-on: gpu
    steps:
    - run: |
        pip install vllm
        bash -c "vllm serve x \\
          --kv-cache-dtype fp8" &  «vllm.kv-cache-dtype»
    - run: vllm bench --help
""",
    "deploy/k8s/configmap.yaml": """
apiVersion: v1
kind: ConfigMap
data:
  HF_HOME: /cache
  engine.yaml: |
    # read by sglang
    model-path: x
    kv-cache-dtype: fp8_e4m3 «sglang.kv-cache-dtype»
""",
    "charts/values.yaml.tpl": """
{{- if .Values.enabled }}
engine: vllm
replicas: {{ .Values.replicas }}
kvCache:
  kv_cache_dtype: fp8 «vllm.kv-cache-dtype»
{{- end }}
""",
    "serving/heredoc.sh": """
cat > engine.yaml <<EOF
model-path: x
kv-cache-dtype: fp8_e5m2 «sglang.kv-cache-dtype»
EOF
python -m sglang.launch_server --config engine.yaml
""",
}

PLANTED |= {
    "systemd/ollama.service.d/override.conf": """
[Service]
Environment="OLLAMA_FLASH_ATTENTION=1"
Environment="OLLAMA_KV_CACHE_TYPE=q8_0" «ollama.kv-cache-type»
""",
    "systemd/llama.service": r"""
[Service]
Environment=LLAMA_ARG_CACHE_TYPE_V=q4_0 «llama.cpp.cache-type-v»
ExecStart=/usr/bin/llama-server -m /models/m.gguf \
  --cache-type-k=q8_0 «llama.cpp.cache-type-k»
""",
    "deploy/run.sh": """
docker run -d --env=OLLAMA_KV_CACHE_TYPE=q8_0 ollama/ollama «ollama.kv-cache-type»
docker run -d -e "OLLAMA_KV_CACHE_TYPE=q4_0" ollama/ollama «ollama.kv-cache-type»
bash -c "OLLAMA_KV_CACHE_TYPE=q4_0 ollama serve" «ollama.kv-cache-type»
launchctl setenv OLLAMA_KV_CACHE_TYPE q8_0 «ollama.kv-cache-type»
EXTRA_ARGS="--kv-cache-dtype=fp8" «vllm.kv-cache-dtype»
vllm serve x $EXTRA_ARGS
""",
    "deploy/.env.production": """
OLLAMA_KV_CACHE_TYPE=q8_0 «ollama.kv-cache-type»
""",
    "deploy/Makefile": """
serve:
\tvllm serve x --kv-cache-dtype fp8 «vllm.kv-cache-dtype»
""",
    "deploy/entrypoint": """
#!/usr/bin/env bash
exec vllm serve x --kv-cache-dtype fp8 «vllm.kv-cache-dtype»
""",
    "deploy/Dockerfile.here": """
FROM vllm/vllm-openai
COPY <<EOF /start.sh
#!/bin/sh
vllm serve x --kv-cache-dtype fp8 «vllm.kv-cache-dtype»
EOF
CMD ["/start.sh"]
""",
    "charts/vllm/values.yaml": """
vllm:
  extraArgs: --kv-cache-dtype=fp8 «vllm.kv-cache-dtype»
start:
  run.sh: |
    export LLAMA_ARG_CACHE_TYPE_K=q8_0 «llama.cpp.cache-type-k»
    exec llama-server
""",
    "deploy/make/Makefile": """
export OLLAMA_KV_CACHE_TYPE := q8_0 «ollama.kv-cache-type»
serve:
\tollama serve
""",
    "deploy/models.ini": """
[small]
cache-type-k = q8_0 «llama.cpp.cache-type-k»
""",
    "deploy/ansible.yml": """
- lineinfile:
    path: /etc/systemd/system/ollama.service.d/override.conf
    line: 'Environment="OLLAMA_KV_CACHE_TYPE=q8_0"' «ollama.kv-cache-type»
""",
    "deploy/backticks.sh": """
PID=`vllm serve x --kv-cache-dtype fp8` «vllm.kv-cache-dtype»
""",
    "evaluate/lm_eval.sh": """
lm_eval --model vllm --model_args pretrained=x,kv_cache_dtype=fp8,dtype=auto «vllm.kv-cache-dtype»
lm_eval --model vllm --model_args pretrained=x,kv_cache_dtype=auto,dtype=auto
""",
    "serving/launch.py": """
import os
import subprocess

os.environ.setdefault("OLLAMA_KV_CACHE_TYPE", "q8_0") «ollama.kv-cache-type»
words = ["vllm", "serve", "x"]
words.append("--kv-cache-dtype=fp8") «vllm.kv-cache-dtype»
subprocess.run(["llama-server", "-m", "m.gguf", "-ctk", "q8_0"]) «llama.cpp.cache-type-k»
""",
    "serving/settings.py": """
from dataclasses import dataclass
import vllm

@dataclass
class Settings:
    model: str = "x"
    kv_cache_dtype: str = "fp8" «vllm.kv-cache-dtype»

OTHER: str = "fp8_e5m2"
setattr(settings, "kv_cache_dtype", OTHER) «vllm.kv-cache-dtype»
create_subprocess_exec("vllm", "serve", "x", "--kv-cache-dtype", "fp8") «vllm.kv-cache-dtype»
""",
    "serving/openvino_chat.py": """
import openvino.properties.hint as hints
import openvino_genai

scheduler = openvino_genai.SchedulerConfig()
scheduler.use_cache_eviction = True «openvino.cache-eviction»
scheduler.use_sparse_attention = True «openvino.sparse-attention»
pipe = openvino_genai.LLMPipeline("m", "CPU", KV_CACHE_PRECISION="u8") «openvino.kv-cache-precision»
other = openvino_genai.LLMPipeline("m", "CPU", **{hints.kv_cache_precision: "u4"}) «openvino.kv-cache-precision»
plain = openvino_genai.LLMPipeline("m", "CPU", KV_CACHE_PRECISION="f16")
""",
    "serving/ovms.sh": """
ovms --model_path m --plugin_config '{"KV_CACHE_PRECISION": "u8"}' «openvino.kv-cache-precision»
""",
    "serving/lmdeploy.py": """
from lmdeploy import TurbomindEngineConfig
small = TurbomindEngineConfig(quant_policy=4) «lmdeploy.quant-policy»
dense = TurbomindEngineConfig(quant_policy=0)
""",
    "serving/lmdeploy.sh": """
lmdeploy serve api_server x --quant-policy 8 «lmdeploy.quant-policy»
""",
    "serving/tgi.sh": """
text-generation-launcher --model-id x --kv-cache-dtype fp8_e4m3fn «tgi.kv-cache-dtype»
docker run -e KV_CACHE_DTYPE=fp8_e5m2 ghcr.io/huggingface/text-generation-inference «tgi.kv-cache-dtype»
""",
    "serving/exl2.py": """
from exllamav2 import ExLlamaV2Cache_Q4
cache = ExLlamaV2Cache_Q4(model) «exllama.quantised-cache»
""",
    "serving/tabby/config.yml": """
model:
  cache_mode: Q4 «exllama.cache-mode»
""",
    "serving/kobold.sh": """
python koboldcpp.py --model m.gguf --flashattention --quantkv 1 «koboldcpp.quantkv»
""",
    "serving/mlx.sh": """
mlx_lm.generate --model x --kv-bits 4 «mlx.kv-bits»
mlx_lm.generate --model x --max-kv-size 512 «mlx.max-kv-size»
""",
    "serving/sinks.py": """
from transformers import SinkCache
cache = SinkCache(window_length=256, num_sink_tokens=4) «transformers.sink-cache»
""",
    "serving/sglang_double.sh": """
python -m sglang.launch_server --model x --enable-double-sparsity «sglang.double-sparsity»
""",
    "serving/trtllm/convert.sh": """
python tensorrt_llm/convert_checkpoint.py --model_dir x --int8_kv_cache «tensorrt-llm.int8-kv-cache»
python tensorrt_llm/run.py --max_attention_window_size 512 «tensorrt-llm.attention-window»
""",
}

CLEAN = {
    "serving/vllm.sh": """
# --kv-cache-dtype fp8 cost two points of refusal: off
vllm serve x --kv-cache-dtype auto --max-model-len 32768 --quantization fp8
""",
    "serving/sglang.yaml": """
model-path: x
kv-cache-dtype: bfloat16
mem-fraction-static: 0.8
radix-eviction-policy: lru
""",
    "models/qwen2/config.json": """
{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": false, "sliding_window": 32768,
 "max_window_layers": 28, "layer_types": ["full_attention"]}
""",
    "models/llama/config.json": """
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "sliding_window": null,
 "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": null}}
""",
    "serving/trtllm.yaml": """
kv_cache_config: {free_gpu_memory_fraction: 0.9, dtype: auto, enable_block_reuse: true, host_cache_size: 0}
sparse_attention_config: null
""",
    "verl/ppo.yaml": """
actor_rollout_ref:
  rollout: {name: vllm, dtype: bfloat16, engine_kwargs: {vllm: {}, sglang: {}}}
algorithm:
  rollout_correction: {rollout_is: null, rollout_rs: null}
""",
    "nemo_rl/grpo.yaml": """
loss_fn: {use_importance_sampling_correction: false}
policy: {generation: {vllm_cfg: {kv_cache_dtype: "auto"}}}
""",
    "deploy/Dockerfile": r"""
FROM ghcr.io/ggml-org/llama.cpp:server
ENV LLAMA_ARG_CACHE_TYPE_K=f16
CMD ["llama-server", "--no-context-shift", "--cache-type-v", "f16"]
""",
    "train/train.py": '''
"""Trains; the flag --kv-cache-dtype fp8 belongs to the engine."""
import argparse

from trl import GRPOConfig
from vllm import LLM

parser = argparse.ArgumentParser()
parser.add_argument("--kv-cache-dtype", default="auto", help="as in: vllm serve --kv-cache-dtype fp8")
args = GRPOConfig(use_vllm=True, vllm_importance_sampling_correction=False)
llm = LLM(model="x", kv_cache_dtype="auto")
print("now without --kv-cache-dtype fp8")
if args.kv_cache_dtype == "fp8":
    raise ValueError(f"{args.model} was never audited with --kv-cache-dtype fp8")
''',
    "deploy/ollama.service": """
[Service]
Environment="OLLAMA_KV_CACHE_TYPE=f16" "OLLAMA_HOST=0.0.0.0"
ExecStart=/usr/bin/ollama serve
""",
    "serving/usage.sh": """
usage() { echo "serve.sh MODEL, as in: vllm serve x --kv-cache-dtype fp8"; }
""",
    "data/cache.yaml": """
model: {cache_mode: disk}
quant_policy: per_channel
""",
    "serving/choices.py": """
import vllm

LOSSLESS = {"kv_cache_dtype": ("auto", "bfloat16")}
""",
    "serving/lmdeploy.sh": """
lmdeploy serve api_server x --quant-policy 0
""",
    "agents/config.toml": """
[condenser]
type = "noop"

[compaction]
auto = true
""",
}


def write_planted(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Write the planted files; returns the lines and rules of each."""
    return {name: _write(folder / name, text) for name, text in PLANTED.items()}


def write_clean(folder: Path) -> None:
    """Write the clean files."""
    for name, text in CLEAN.items():
        _write(folder / name, text)


def _write(path: Path, text: str) -> list[tuple[int, str]]:
    rows = text.lstrip("\n").split("\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(_MARK.sub("", row) for row in rows), encoding="utf-8")
    return [(number, rule) for number, row in enumerate(rows, 1) for rule in _MARK.findall(row)]
