"""Read answers with the tool parsers of vLLM; its Python runs this file, since it is in an environment of its own.

stdin: a JSON row {parser, tools, text} a line. stdout: a line for each, its list of [name, arguments] or an error.
"""

import json
import logging
import sys
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager


class Vocabulary(dict):
    """Has every token, since parsers ask for their marks in it."""

    def __missing__(self, token: str) -> int:
        return 7

    def __contains__(self, token: object) -> bool:
        return True

    def get(self, token: str, default: Any = None) -> int:
        return 7


class Tokenizer:
    """A stand-in: text parsers use a tokenizer's vocabulary alone."""

    def get_vocab(self) -> Vocabulary:
        return Vocabulary()


def calls_of(row: dict[str, Any]) -> list[list[Any]] | str:
    messages = [{"role": "user", "content": "?"}]
    request = ChatCompletionRequest(model="m", messages=messages, tools=row["tools"])
    parser = ToolParserManager.get_tool_parser(row["parser"])(Tokenizer(), request.tools)
    result = parser.extract_tool_calls(row["text"], request)
    calls = result.tool_calls if result.tools_called else ()
    return [[call.function.name, json.loads(call.function.arguments)] for call in calls]


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        try:
            print(json.dumps(calls_of(json.loads(line))), flush=True)
        except Exception as error:
            print(json.dumps(f"{type(error).__name__}: {error}"[:300]), flush=True)
