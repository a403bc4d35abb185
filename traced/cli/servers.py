"""The commands that run until they are stopped: up (the service) and serve (the router)."""

import os

from traced.cli.options import AsJson, DataDir, Model, Overrides, Seed, Threads, read_settings
from traced.cli.output import console, print_json
from traced.config import logs
from traced.config.settings import child_environment


def up(
    *,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
) -> None:
    """Run the service until it is stopped: it runs cycles and waits for decisions of a person."""
    # Both processes run for weeks, so neither loads the libraries of the other (FastAPI here, NumPy in ``serve``).
    from traced.app import service

    options = {"engine.threads": threads, "model.spec": model}
    pairs = [*(overrides or []), *(f"{key}={value}" for key, value in options.items() if value is not None)]
    os.environ.update(child_environment(pairs))
    service.up(lambda: read_settings(data_dir, overrides, model__spec=model, seed=seed, engine__threads=threads))


def serve(
    *,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    model: Model = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Run the router, an OpenAI-compatible endpoint that serves the base model and the live adapters to agents."""
    import uvloop

    from traced.gateway import server  # imported late as in ``up``

    os.environ.update(child_environment(overrides or []))
    settings = read_settings(data_dir, overrides, model__spec=model, engine__threads=threads)
    logs.configure(settings.log, settings.data_dir, now=server.now)

    def ready(url: str) -> None:
        if as_json:
            print_json({"url": url})
        else:
            message = f'Serving at {url}/v1: set it as your agent\'s base URL and request the model "auto"'
            console.print(message, highlight=False)

    uvloop.run(server.serve(settings, ready))
