"""Which processes of a data directory use which adapters on engines that outlive them.

A process that is killed leaves its adapters on a shared vLLM, where they take up slots. Each process therefore records
the names that it uses, in a file of its own, before it loads them; ``unload_unused`` unloads those that no live process
has recorded.

Invariants: only adapters whose name ends in a digest, from a folder of this data directory, are unloaded; a process on
another machine counts as alive. Not covered: adapters of trainings (``traced.training.policy_engine``) and of the
router, which have other names.
"""

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from traced.core.files import publish_file
from traced.core.ownership import is_alive, own_identity
from traced.inference.client import EngineClient
from traced.inference.errors import EngineError, RequestError

FOLDER = Path("engines") / "users"
DIGEST_LENGTH = 12
NAME = re.compile(rf".+\+[0-9a-f]{{{DIGEST_LENGTH}}}")
log = logging.getLogger(__name__)


def name_on_engine(adapter: str, digest: str) -> str:
    """Return the name under which an adapter is loaded.

    It carries the digest, because a shared engine may hold an adapter of the same name with other weights. It differs
    from the name of a version, so that the router does not unload it.
    """
    return f"{adapter}+{digest[:DIGEST_LENGTH]}"


def record_use(data_dir: Path, names: Collection[str]) -> None:
    """Record the names that this process uses; none deletes its file."""
    owner = own_identity()
    file = data_dir / FOLDER / f"{hashlib.sha256(owner.encode()).hexdigest()[:16]}.json"
    if not names:
        file.unlink(missing_ok=True)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    publish_file(file, json.dumps({"owner": owner, "adapters": sorted(names)}) + "\n")


def names_in_use(data_dir: Path) -> set[str]:
    """Return the names that live processes use, and delete the files of those that have ended."""
    names: set[str] = set()
    for file in (data_dir / FOLDER).glob("*.json"):
        # A file that cannot be read states no use.
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            record = json.loads(file.read_text(encoding="utf-8"))
            # None: on another machine, where it may be alive.
            if is_alive(record["owner"]) is False:
                file.unlink(missing_ok=True)
            else:
                names |= set(record["adapters"])
    return names


async def unload_unused(clients: Sequence[EngineClient], data_dir: Path) -> None:
    """Unload the adapters that an ended process of the data directory has left on the engines.

    Engines that do not answer, or do not state an adapter's folder, are passed over.
    """
    for client in clients:
        with contextlib.suppress(EngineError):
            for name in filter(NAME.fullmatch, await client.models()):
                folder = Path((await client.model_entry(name) or {}).get("root") or "")
                if name in names_in_use(data_dir) or not folder.resolve().is_relative_to(data_dir.resolve()):
                    continue
                log.info("unloading %s from %s: no process uses it", name, client.url)
                with contextlib.suppress(RequestError):
                    await client.unload_adapter(name)
