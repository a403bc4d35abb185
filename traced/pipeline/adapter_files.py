"""Serve a published adapter version on the cycle's engine, with the bytes that the store has hashes of.

Invariants: files that differ are never served, and put their version in quarantine. The engine may load a file again
after it was checked (it may be restarted), so callers that judge a version call ``check_version`` again afterwards.
"""

import asyncio
from pathlib import Path

from traced.core.errors import AdapterChanged, CapabilityError, StageError
from traced.pipeline.context import Context
from traced.registry.integrity import check_usable, folder_state, quarantining, stored_version


async def serve_version(context: Context, adapter: str) -> None:
    """Serve an adapter version; one that is loaded is not loaded again.

    Raises:
        CapabilityError: The version is in quarantine, or its files differ.
        PromotionError: Its folder cannot be read.
        StageError: Its folder was written to while the engine loaded it.
    """
    folder = Path(stored_version(context.store, adapter).path)
    state = folder_state(folder)
    await check_version(context, adapter)
    await context.serve(adapter, folder)
    if folder_state(folder) != state:
        await check_version(context, adapter)
        raise StageError(f"{folder} was written to while the engine loaded it", hint="run the same command again")


async def check_version(context: Context, adapter: str) -> None:
    """Check that the files of an adapter version are those that were published; raises as ``serve_version``."""
    version = stored_version(context.store, adapter)
    try:
        with quarantining(context.store, context.settings.notify.names, context.now):
            await asyncio.to_thread(check_usable, version)
    except AdapterChanged as error:
        raise CapabilityError(error.message, hint=error.hint) from error
