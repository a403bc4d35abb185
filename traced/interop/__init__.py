"""Environments between traced and two projects that others train with: ``verifiers`` and ``openenv``.

``export`` writes an environment as a package of theirs, ``recognise`` reads a package of theirs for admission. Neither
project is a dependency (they exclude one another: verifiers 0.4.0 pins mcp 2.0.0, openenv 0.10.0 needs fastmcp 3, which
needs mcp 1); what follows was read in their sources on PyPI, at these versions, on Python 3.11.

verifiers 0.4.0 (the interface ``verifiers.v1``; ``load_environment`` and ``MultiTurnEnv`` of 0.1 are gone)
    An environment is an installed package whose ``__all__`` names one ``Taskset`` (tasks, each with ``@vf.reward``
    methods over a finished trace) and, if it wants, one ``Harness`` (the program that plays a task; it may run in
    verifiers' own process) and one ``Env``. ``vf-validate ID`` needs no model: *gold* runs ``Task.validate``, the
    reference solution; *noop* scores the untouched task, invalid at reward 1. ``vf-eval ID`` plays tasks with a model
    behind an OpenAI-compatible URL. Both run in a remote box unless ``--runtime.type subprocess`` is said.

openenv 0.10.0 (the former openenv-core ends at 0.3.0)
    An environment is a folder with ``openenv.yaml``, models, client and a FastAPI server with reset(seed), step, state.
    ``openenv validate DIR --level static`` reads ``openenv.yaml`` and its ``validation:`` block (reward range and
    margins within the policy's bounds, resources, capabilities). ``--url`` asks a running server for its endpoints.
    Level *runtime* builds the image, replays the plan of ``validation.execution.probe_path`` and grades rewards,
    observation schema and state; network policy where the provider measures it; the policy's other checks, all of
    level *semantic* (oracle, floor, determinism) among them, are "not implemented in this build". ``openenv push``
    wants a fixed set of files, and other ways to serve a ``uv.lock``.

Not covered: publishing on either hub, and importing a package of theirs as something to train on.

What can go wrong between traced and other projects' environments.

InteropError            (exit code 1)
├── NoSuchEnvironment   no file of that name, and no or more than one stored environment begins with that hash
├── NotExportable       the source cannot become a package as it stands
├── InTheWay            there is something where the package would be written
└── NotRecognised       a folder holds no environment of a known kind, or several
"""

from traced.core.errors import TracedError


class InteropError(TracedError):
    """An environment could not be exported or recognised."""


class NoSuchEnvironment(InteropError):
    """No file of that name, and no or more than one stored environment begins with that hash."""


class NotExportable(InteropError):
    """The source cannot become a package as it stands."""


class TargetUnavailable(InteropError):
    """There is something where the package would be written."""


class NotRecognised(InteropError):
    """A folder holds no environment of a known kind, or several."""
