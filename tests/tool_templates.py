"""Chat templates with tools, written small for the tests: each has the structure of a family's own, not its text.

``FORMS`` names the form that each belongs to, None for a template that takes no tools.
"""

from __future__ import annotations

from typing import Any

from conftest import byte_tokenizer

_CHATML_TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_CHATML_END = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_CHATML_RESULT = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)
_JSON_CALL = (
    '{{ \'\\n<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}"
)


def _chatml(listing: str, call: str, *, content: str = "m.content", default: str = "") -> str:
    """A template of turns in <|im_start|>, with tools listed at the end of the system prompt."""
    return (
        "{% if tools %}{{ '<|im_start|>system\\n' }}"
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
        f"{{% else %}}{{{{ '{default}' }}}}{{% endif %}}"
        f"{{{{ '\\n\\nTools:' }}}}{{% for t in tools %}}{listing}{{% endfor %}}"
        "{{ '\\nCall them in tags.<|im_end|>\\n' }}"
        "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
        f"{{% elif '{default}' %}}{{{{ '<|im_start|>system\\n{default}<|im_end|>\\n' }}}}{{% endif %}}"
        "{% for m in messages %}"
        "{% if m.role == 'user' or (m.role == 'system' and not loop.first) "
        f"or (m.role == 'assistant' and not m.tool_calls) %}}{_CHATML_TURN}"
        "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}"
        f"{{% if m.content %}}{{{{ '\\n' + {content} }}}}{{% endif %}}"
        f"{{% for c in m.tool_calls %}}{call}{{% endfor %}}{{{{ '<|im_end|>\\n' }}}}"
        f"{{% elif m.role == 'tool' %}}{_CHATML_RESULT}{{% endif %}}"
        f"{{% endfor %}}{_CHATML_END}"
    )


QWEN25 = _chatml("{{ '\\n' + t | tojson }}", _JSON_CALL, default="You are a helper.")
QWEN3 = _chatml("{{ '\\n' }}{{ t | tojson }}", _JSON_CALL, content="m.content.split('</think>')[-1].lstrip('\\n')")
HERMES = _chatml(
    "{{ ' ' + {'type': 'function', 'function': t.function} | tojson }}",
    '{{ \'\\n<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}",
)
QWEN_CODER = _chatml(
    "{{ '\\n<function>\\n<name>' + t.function.name + '</name>' }}"
    "{% if t.function.description %}{{ '\\n<description>' + t.function.description | trim + '</description>' }}"
    "{% endif %}{% for k, p in t.function.parameters.properties | items %}"
    "{{ '\\n<parameter>\\n<name>' + k + '</name>\\n' + p | tojson + '\\n</parameter>' }}{% endfor %}"
    "{{ '\\n</function>' }}",
    "{{ '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
    "{% for k, v in c.function.arguments | items %}{{ '<parameter=' + k + '>\\n' }}"
    "{{ v if v is string else v | tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}",
)
GLM = (
    "{{ '[gMASK]<sop>' }}{% if tools %}{{ '<|system|>\\n# Tools' }}"
    "{% for t in tools %}{{ '\\n' }}{{ t | tojson(ensure_ascii=False) }}{% endfor %}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<|user|>\\n' + m.content }}"
    "{% elif m.role == 'system' %}{{ '<|system|>\\n' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>' }}{% if m.content %}{{ '\\n' + m.content | trim }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>' + c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}"
    "{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}"
    "{{ v | tojson(ensure_ascii=False) if v is not string else v }}{{ '</arg_value>' }}{% endfor %}"
    "{{ '\\n</tool_call>' }}{% endfor %}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# one call at a time, tools in the first message of the user, results as JSON texts
LLAMA31 = (
    "{{ '<|begin_of_text|>' }}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{% if tools %}{{ 'Environment: ipython\\n' }}{% endif %}"
    "{{ system + '<|eot_id|>' }}"
    "{% if tools %}"
    "{% if messages[0].role != 'user' %}{{ raise_exception('tools need a user') }}{% endif %}"
    '{{ \'<|start_header_id|>user<|end_header_id|>\\n\\nAnswer with {"name": name, "parameters": values}.\\n\\n\' }}'
    "{% for t in tools %}{{ t | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}"
    "{{ messages[0].content | trim + '<|eot_id|>' }}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}"
    "{% if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
    "{% elif 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' }}{{ c.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}"
    "{% if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
PYTHONIC = (
    "{{ '<|begin_of_text|>' }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|header_start|>system<|header_end|>\\n\\n' + system }}"
    "{% if tools %}{{ '\\nWrite calls as [f(a=1)].\\n[' }}"
    "{% for t in tools %}{{ t | tojson }}{{ ', ' if not loop.last }}{% endfor %}{{ ']' }}{% endif %}{{ '<|eot|>' }}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ '<|header_start|>ipython<|header_end|>\\n\\n' + m.content | tojson + '<|eot|>' }}"
    "{% else %}{{ '<|header_start|>' + m.role + '<|header_end|>\\n\\n' + m.content | trim }}"
    "{% if m.tool_calls %}{{ '[' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}"
    "{% for k, v in c.function.arguments.items() %}{{ k + '=' }}{{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}"
    "{{ ')' }}{{ ', ' if not loop.last }}{% endfor %}{{ ']' }}{% endif %}{{ '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}{% endif %}"
)
# tools before the last message of the user, ids of nine letters, users and assistants in turn
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
    "{{ '<s>' }}{% for m in messages %}"
    "{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS] [' }}"
    "{% for t in tools %}{{ t | tojson }}{{ ', ' if not loop.last }}{% endfor %}{{ '][/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + (system + '\\n\\n' if system and loop.last else '') + m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('ids of nine letters') }}{% endif %}"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' }}{{ c.function.arguments | tojson }}'
    "{{ ', \"id\": \"' + c.id + '\"}' }}{{ ', ' if not loop.last }}{% endfor %}{{ ']</s>' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + '</s>' }}"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{ raise_exception('ids') }}{% endif %}"
    "{{ '[TOOL_RESULTS] {\"content\": ' + m.content + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
)
# tools in a namespace of TypeScript, one call a message, a result only behind its call
GPT_OSS = (
    "{{ '<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>' }}"
    "{% set first = messages[0] if messages[0].role == 'system' %}"
    "{% if first or tools %}{{ '<|start|>developer<|message|>' }}{% if first %}{{ first.content }}{% endif %}"
    "{% if tools %}{{ '\\n\\n# Tools\\n\\nnamespace functions {' }}{% for t in tools %}"
    "{{ '\\n// ' + t.function.description + '\\ntype ' + t.function.name + ' = (_: {' }}"
    "{% for k, p in t.function.parameters.properties.items() %}{{ '\\n' + k + '?: ' }}"
    "{{ p.type | string + ',' }}{% endfor %}"
    "{{ '\\n}) => any;' }}{% endfor %}{{ '\\n}' }}{% endif %}{{ '<|end|>' }}{% endif %}"
    "{% set last = namespace(name='') %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    "{% if m.content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}"
    "{{ c.arguments | tojson }}{{ '<|call|>' }}{% set last.name = c.name %}"
    "{% elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{% set last.name = '' %}"
    "{% elif m.role == 'tool' %}{% if not last.name %}{{ raise_exception('a result without a call') }}{% endif %}"
    "{{ '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{ m.content | tojson }}{{ '<|end|>' }}"
    "{% elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# arguments as text
DEEPSEEK = (
    "{{ '<｜begin▁of▁sentence｜>' }}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if tools %}{{ '\\n\\n## Tools' }}{% for t in tools %}"
    "{{ '\\n\\n### ' + t.function.name + '\\n' + t.function | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content }}"
    "{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' }}"
    "{{ c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}"
    "{{ '<｜end▁of▁sentence｜>' }}"
    "{% elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
# reads tools from a message and not from its argument
PHI = (
    "{% for m in messages %}{% if m.role == 'system' and m.tools is defined %}"
    "{{ '<|system|>' + m.content + '<|tool|>' + m.tools + '<|/tool|><|end|>' }}"
    "{% else %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% if messages[0].role == 'system' %}{% set head = messages[0].content + '\\n\\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set head = '' %}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (head if loop.first else '') }}"
    "{{ m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
TEMPLATES = {
    "qwen25": QWEN25, "qwen3": QWEN3, "hermes": HERMES, "qwen_coder": QWEN_CODER, "glm": GLM, "llama31": LLAMA31,
    "pythonic": PYTHONIC, "mistral": MISTRAL, "gpt_oss": GPT_OSS, "deepseek": DEEPSEEK, "phi": PHI, "gemma": GEMMA,
}  # fmt: skip
FORMS: dict[str, str | None] = {
    "qwen25": "hermes", "qwen3": "hermes", "hermes": "hermes", "qwen_coder": "qwen_coder", "glm": "glm",
    "llama31": "llama_json", "pythonic": "pythonic", "mistral": "mistral", "gpt_oss": "harmony",
    "deepseek": "deepseek", "phi": None, "gemma": None,
}  # fmt: skip
NATIVE = [name for name, form in FORMS.items() if form is not None]
ONE_CALL = ("llama31", "gpt_oss")  # templates that write one call at a time
_STOPS = {
    "glm": ("<|user|>", "<|observation|>"), "llama31": ("<|eot_id|>",), "pythonic": ("<|eot|>",), "mistral": ("</s>",),
    "gpt_oss": ("<|end|>", "<|call|>"), "deepseek": ("<｜end▁of▁sentence｜>",), "phi": ("<|end|>",),
    "gemma": ("<end_of_turn>",),
}  # fmt: skip


def tool_tokenizer(name: str) -> Any:
    """Return a byte tokenizer with the template and the tokens that end its turns."""
    from tokenizers import AddedToken

    tokenizer = byte_tokenizer(TEMPLATES[name])
    stops = _STOPS.get(name, ())
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(stop, special=True) for stop in stops]})
    if stops:
        tokenizer.eos_token = stops[0]
    return tokenizer


def stops_of(tokenizer: Any, name: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(stop) for stop in _STOPS.get(name, ())]
