"""Exchange environments with two other projects, ``verifiers`` and ``openenv``.

``export`` writes an environment as a package of one of these projects; ``recognition`` reads such a package for
admission. Neither project is a dependency, because they exclude one another (verifiers 0.4.0 pins mcp 2.0.0, openenv
0.10.0 needs fastmcp 3, which needs mcp 1). The following facts come from their sources on PyPI, for Python 3.11.

verifiers 0.4.0 (the interface ``verifiers.v1``; ``load_environment`` and ``MultiTurnEnv`` of 0.1 are gone)
    An environment is an installed package whose ``__all__`` names one ``Taskset`` (tasks with ``@vf.reward`` methods
    over a finished trace) and optionally a ``Harness`` (the program that plays a task, possibly in verifiers' own
    process) and an ``Env``. ``vf-validate ID`` needs no model: *gold* runs ``Task.validate``, the reference solution;
    *noop* scores the untouched task, which is invalid at reward 1. ``vf-eval ID`` plays tasks with a model behind an
    OpenAI-compatible URL. Both run in a remote sandbox unless ``--runtime.type subprocess`` is given.

openenv 0.10.0 (the last release of the package openenv-core is 0.3.0)
    An environment is a folder with ``openenv.yaml``, models, a client and a FastAPI server with reset(seed), step and
    state. ``openenv validate DIR --level static`` reads ``openenv.yaml`` and its ``validation:`` block (reward range
    and margins, resources, capabilities); ``--url`` checks the endpoints of a running server. Level *runtime* builds
    the image, replays the plan of ``validation.execution.probe_path`` and grades rewards, observation schema and
    state, and network policy where the provider measures it. Checks of level *semantic* (oracle, floor, determinism)
    are "not implemented in this build". ``openenv push`` expects a fixed set of files, and a ``uv.lock`` for other
    ways to serve.

Not covered: publishing on either hub, and importing packages of the two projects for training.

InteropError            (exit code 1)
├── NoSuchEnvironment   the name is neither a readable file nor the hash of exactly one stored environment
├── NotExportable       the source cannot become a package
├── TargetUnavailable   the folder for the package is not empty or cannot be written
└── NotRecognised       a folder holds no environment of a known kind, or more than one
"""

from traced.core.errors import TracedError


class InteropError(TracedError):
    """An environment could not be exported or recognised."""


class NoSuchEnvironment(InteropError):
    """The name is neither a readable file nor the hash of exactly one stored environment."""


class NotExportable(InteropError):
    """The source cannot become a package."""


class TargetUnavailable(InteropError):
    """The folder for the package is not empty or cannot be written."""


class NotRecognised(InteropError):
    """A folder holds no environment of a known kind, or more than one."""
