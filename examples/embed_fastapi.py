"""An engine embedded in a FastAPI service, with a route for whole responses and a route that streams JSON lines.

dflash-precompile                                  # once: builds the bundle of the embedded pair
python examples/embed_fastapi.py [--bundle DIR] [--port 8000] [--max_waiting 64]
curl localhost:8000/complete -H 'content-type: application/json' -d '{"prompt": "import os"}'
curl -N localhost:8000/stream -H 'content-type: application/json' -d '{"prompt": "import os"}'
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field

from dflash_aot.cache.errors import BadInput, EngineFailed, GridMiss, QueueFull
from dflash_aot.cache.files.locations import user_cache_directory
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.requests.request import AsyncStream

DEADLINE_SECONDS = 60.0


class CompletionBody(BaseModel):
    prompt: str = Field(min_length=1)
    max_tokens: int = Field(64, ge=1)


async def submit(body: CompletionBody, request: Request) -> AsyncIterator[AsyncStream]:
    """Submits the request before the response begins; at the end of the response, for any reason, frees the slot."""
    engine: Engine = request.app.state.engine
    stream = await engine.asubmit(
        body.prompt, SamplingParams(max_tokens=body.max_tokens), deadline=DEADLINE_SECONDS
    )
    try:
        yield stream
    finally:
        stream.close()


Submitted = Annotated[AsyncStream, Depends(submit)]


def create_app(bundle: Path, max_waiting: int) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with await asyncio.to_thread(
            Engine.open, bundle, max_waiting=max_waiting, preload=True
        ) as app.state.engine:
            yield  # until uvicorn has answered all open requests

    app = FastAPI(lifespan=lifespan)

    @app.post("/complete")
    async def complete(stream: Submitted, request: Request) -> Response:
        async for _ in stream:
            if await request.is_disconnected():
                return Response(status_code=499)  # the client has disconnected
        result = await stream.result()
        return JSONResponse({"text": result.text, "finish_reason": result.finish_reason})

    @app.post("/stream")
    async def stream_lines(stream: Submitted) -> Response:
        async def lines() -> AsyncIterator[bytes]:
            async for delta in stream:
                yield (
                    msgspec.json.encode({"text": delta.text, "finish_reason": delta.finish_reason})
                    + b"\n"
                )

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    @app.get("/health")
    async def report_health(request: Request) -> Response:
        engine: Engine = request.app.state.engine
        stats = engine.stats()
        health = {"failure": engine.failure, "running": stats.running, "finished": stats.finished}
        return JSONResponse(health, 503 if engine.failure else 200)

    @app.exception_handler(QueueFull)
    async def refuse_overload(_: Request, error: QueueFull) -> Response:
        return JSONResponse({"error": str(error)}, 503, {"retry-after": "1"})

    @app.exception_handler(BadInput)
    @app.exception_handler(GridMiss)
    async def refuse_input(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    @app.exception_handler(EngineFailed)
    async def report_failure(_: Request, __: EngineFailed) -> Response:
        return JSONResponse({"error": "the engine failed at this request"}, 500)

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=user_cache_directory() / "embedded")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max_waiting", type=int, default=64)
    given = parser.parse_args()
    uvicorn.run(create_app(given.bundle, given.max_waiting), port=given.port)
