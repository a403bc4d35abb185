"""Read the body of a request that was admitted: bounded, decompressed and parsed without stopping other requests.

Invariants: nothing is read before the caller asks for it, ``100 Continue`` included; ``max_bytes`` bounds the
compressed and the decompressed body; decompression runs on a thread. The server must be started with
``auto_decompress=False``, because aiohttp otherwise decompresses bodies in the event loop, refused ones as well.
Errors: ``Refusal`` 400, 413 and 415. Not covered: the encodings br and zstd, and bodies that are compressed more than
once.
"""

import asyncio
import zlib

import aiohttp
from aiohttp import hdrs, web

from traced.core.fast_json import exceeds_depth, read_json
from traced.gateway.errors import Refusal

MB = 2**20
# Nesting levels that a request may have; the limit protects recursive code that reads stored requests.
MAX_DEPTH = 200
# Larger bodies are parsed on a thread: their objects take longer to check than other requests should wait.
PARSE_ON_THREAD = 2**18
GZIP, DEFLATE = ("gzip", "x-gzip"), "deflate"
# The lower half of the first byte of zlib's format (RFC 1950); some clients send deflate data without it.
ZLIB_METHOD = 8
# Set when the application begins to stop.
STOPPING = web.AppKey("stopping", asyncio.Event)


def check_declared_size(request: web.Request, max_bytes: int) -> None:
    """Check the declared size of a body, which is not read; raises ``Refusal`` 413."""
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)


async def expect_body(request: web.Request) -> None:
    """Answer ``Expect: 100-continue`` with nothing: ``read_body`` asks for the body when it is wanted."""


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """Return the decompressed bytes of the body.

    Raises:
        Refusal: 400 for a damaged body, 413 for one that is too large, 415 for an unknown Content-Encoding, 503 if the
            router stops before the whole body has arrived.
    """
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower()
    if encoding not in ("identity", DEFLATE, *GZIP):
        raise Refusal(415, f"Content-Encoding is gzip, deflate or identity, not {encoding[:100]!r}")
    if request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # aiohttp would count these bytes as the beginning of the response.
        request.writer.output_size = 0
    try:
        compressed = await _read(request)
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(max_bytes) from error
    except (aiohttp.ClientPayloadError, aiohttp.http.HttpProcessingError, web.RequestPayloadError) as error:
        raise Refusal(400, f"the body cannot be read: {error}") from error
    if encoding == "identity" or not compressed:
        return compressed
    return await asyncio.to_thread(decompress, compressed, encoding, max_bytes)


async def _read(request: web.Request) -> bytes:
    # A small body has usually arrived together with the head.
    if request.content.is_eof():
        return await request.read()
    body = asyncio.ensure_future(request.read())
    stopping = asyncio.ensure_future(request.app[STOPPING].wait())
    try:
        await asyncio.wait({body, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if body.done():
            return await body
        # aiohttp drops what arrives after it has begun to stop.
        raise Refusal(503, "the router stops; repeat the request", code="router_stops", retry_after=1)
    finally:
        body.cancel()
        stopping.cancel()


async def read_json_object(request: web.Request, max_bytes: int) -> tuple[bytes, dict[str, object]]:
    """Return the bytes of the body and the JSON object in them; raises ``Refusal`` as ``read_body`` and 400."""
    raw = await read_body(request, max_bytes)
    return raw, _parse(raw) if len(raw) <= PARSE_ON_THREAD else await asyncio.to_thread(_parse, raw)


def decompress(compressed: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decompress a gzip or deflate body of at most ``max_bytes``; raises ``Refusal`` 400 and 413."""
    window_bits = zlib.MAX_WBITS + 16
    if encoding == DEFLATE:
        window_bits = zlib.MAX_WBITS if compressed[0] & 0xF == ZLIB_METHOD else -zlib.MAX_WBITS
    body = bytearray()
    try:
        # Data in gzip's format may consist of several members (RFC 1952, section 2.2).
        while compressed:
            decompressor = zlib.decompressobj(window_bits)
            body += decompressor.decompress(compressed, max_bytes + 1 - len(body))
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
            if not decompressor.eof:
                raise Refusal(400, "the body cannot be decompressed: it is cut off")
            compressed = decompressor.unused_data if encoding in GZIP else b""
    except zlib.error as error:
        raise Refusal(400, f"the body cannot be decompressed: {error}") from error
    return bytes(body)


def _parse(raw: bytes) -> dict[str, object]:
    try:
        body = read_json(raw)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not readable JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(400, "the body must be a JSON object")
    # Counting brackets is cheap and shows for nearly all requests that they cannot be nested too deeply.
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and exceeds_depth(body, MAX_DEPTH):
        raise Refusal(400, f"the body is nested deeper than {MAX_DEPTH} levels")
    return body


def _too_large(max_bytes: int) -> Refusal:
    return Refusal(413, f"the request is larger than {max_bytes // MB} MiB", code="request_too_large")
