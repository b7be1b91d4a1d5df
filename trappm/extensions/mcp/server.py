"""Server of the Model Context Protocol over standard input and output.

The SDK's low-level server takes schemas as they are; its `MCPServer` would derive others from
signatures, and report faults in several lines. Calls run one after the other, since one thread owns
the caches of predictions and the tracer. A canceled call runs to its end before the next one
begins. While the server runs, the SDK sends all other output to standard error.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import anyio
from anyio import CapacityLimiter, to_thread
from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    ToolAnnotations,
)
from mcp.types import Tool as ToolOfProtocol
from pydantic import ValidationError

from trappm import __version__
from trappm.extensions.mcp.tools import Tool, tools
from trappm.prediction.requests import request_fault
from trappm.profiler.errors import InputError, TrappmError, nearest

_log = logging.getLogger("trappm.mcp")


def make_server() -> Server[Any]:
    """Return the server with all tools; it is not connected to a client."""
    known = {tool.name: tool for tool in tools()}
    limiter = CapacityLimiter(1)

    async def list_tools(_: Any, _page: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[_described(tool) for tool in known.values()])

    async def call_tool(_: Any, call: CallToolRequestParams) -> CallToolResult:
        try:
            tool = known.get(call.name)
            if tool is None:
                raise InputError(f"Unknown tool {call.name!r}; {nearest(call.name, known)}")
            request = _read(tool, call.arguments or {})
            values = await to_thread.run_sync(tool.run, request, limiter=limiter)
        except TrappmError as error:
            return _result(" ".join(str(error).split()), is_error=True)
        except Exception:
            _log.exception("%s failed", call.name)
            return _result("unexpected error; see the server's log", is_error=True)
        text = json.dumps(values, default=str)
        return _result(text, structured_content=json.loads(text))

    return Server(
        "trappm",
        version=__version__,
        title="TraPPM",
        instructions="Predictions of deep-learning training steps. Figures have their unit in "
        "their name; `missing` has the reason for each figure that is null.",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def serve() -> None:
    """Serve a client until it closes standard input."""

    async def run() -> None:
        server = make_server()
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())

    anyio.run(run)


def _described(tool: Tool) -> ToolOfProtocol:
    return ToolOfProtocol(
        name=tool.name,
        description=tool.does,
        input_schema=tool.request.model_json_schema(),
        output_schema=tool.result.model_json_schema(mode="serialization"),
        annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False),
    )


def _read(tool: Tool, arguments: dict[str, Any]) -> Any:
    """Return the request in a call; raises InputError with its first fault."""
    try:
        return tool.request.model_validate(arguments)
    except ValidationError as error:
        [fault, *_] = error.errors(include_url=False)
        see = f"see the schema of {tool.name}"
        raise request_fault(fault, tool.request.model_fields, see) from error


def _result(text: str, **more: Any) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], **more)
