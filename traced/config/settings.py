"""Settings of a data directory: defaults < ``traced.toml`` < environment (``TRACED_TRAINING__LR``) < command line.

The defaults depend on the base model (``traced.config.profiles``), which any of these sources may name.

A ``traced.toml`` in the data directory takes precedence over one in the working directory; the two are never merged.
The data directory itself is not a key of the file, because the file is looked up in it. Secrets are not settings: keys
that end in ``_file`` name the files with them. Class docstrings and field descriptions are shown to users by ``traced
init``.
"""

import difflib
import hashlib
import json
import logging
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from traced.config.cycle_sections import (
    EXECUTION_KEYS,
    REQUEST_KEYS,
    AdmissionSection,
    AnalysisSection,
    CollectSection,
    CompositionSection,
    GateSection,
    HeldOutSection,
    LlmSection,
    OutcomesSection,
    PromotionSection,
    PromptingSection,
    RoutingSection,
    SynthesisSection,
    TrainingSection,
    UserSection,
)
from traced.config.engine_section import RENAMED, EngineSection
from traced.config.profiles import BUNDLED, profile
from traced.config.section import Section
from traced.config.service_sections import (
    REMOVED,
    ApiSection,
    DevicesSection,
    ExecutorSection,
    LogSection,
    NotifySection,
    RetentionSection,
    ServiceSection,
    ServingSection,
    TriggersSection,
)
from traced.core.errors import ConfigError
from traced.core.location import (
    data_directory,
    default_store_url,
    find_settings_file,
    read_settings_file,
    with_password,
)
from traced.core.redaction import redacted

log = logging.getLogger(__name__)
ENV_PREFIX = "TRACED_"
NOT_IN_FILE = {"data_dir"}
# Values of keys with these prefixes may be secrets, and no error shows them.
MODEL_TABLES = ("llm", "outcomes.judge", "target.user")
SECRET_PREFIXES = ("notify.", *(f"{table}.{key}" for table in MODEL_TABLES for key in ("base_url", "api_key")))
SERVICE_SECTIONS = (
    "executor",
    "log",
    "service",
    "notify",
    "api",
    "triggers",
    "telemetry",
    "serving",
    "outcomes",
    "promotion",
)
# Sections that do not change the results of a cycle.
EXCLUDED_SECTIONS = ("data_dir", "store", "seed", "retention", "devices", "prompting", *SERVICE_SECTIONS)
# How a target is started. It is never read from a stored cycle: a restored store must not name a program.
START_KEYS = ("kind", "factory", "python", "options", "trusted", "start_s", "step_s")
# Keys that are not stored with a cycle: most limit time, cost or speed and do not change its results.
EXCLUDED_KEYS: dict[str, Any] = {
    "engine": set(EngineSection.model_fields) - {"max_batch", "max_length", "max_tokens", "temperature"},
    "synthesis": {"starts", "candidates", "repairs", "file_tokens", "max_tokens", "max_cost", "max_minutes"},
    "llm": REQUEST_KEYS,
    "training": EXECUTION_KEYS,
    "target": {**dict.fromkeys(START_KEYS, True), "user": REQUEST_KEYS},
}
TARGETS = "targets"  # in the data directory
TARGET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
TARGET_NAME_LENGTH = 64  # a name is part of file names
# A digest of the keys of [target] that ``START_KEYS`` leaves out of a cycle's configuration.
TARGET_START = "start"
# Environment variables with the prefix that are not settings.
NON_SETTING_VARIABLES = {
    "TRACED_DATA_DIR",
    "TRACED_DEBUG",
    "TRACED_DOCKERD_LOG",
    "TRACED_DOCKER_SOCKET",
    "TRACED_VLLM_PYTHON",
}


class StoreSection(Section):
    """The database."""

    url: str = Field(default="", description='SQLAlchemy URL; "": SQLite in the data directory')
    password_file: str = Field(default="", description="file with the database password, instead of one in the URL")


class TargetSection(Section):
    """The tasks that the agent is improved on, and the world that they are played in."""

    name: str = Field(default="desk", description="name of the target")
    kind: Literal["", "file", "python", "openenv", "verifiers", "recorded"] = Field(
        default="",
        description='"file", "python", "openenv", "verifiers" or "recorded": what this table is; "": a listed name',
    )
    factory: str = Field(
        default="",
        description='file: FILE.py; python: "module:function" or "FILE.py:function"; openenv: URL; verifiers: id',
    )
    python: str = Field(default="", description='interpreter that the target is installed in; "": that of traced')
    options: tuple[str, ...] = Field(default=(), description='arguments of the factory: ["KEY=VALUE", ...]')
    trusted: bool = Field(default=False, description="file: run it in a process of this machine, not in the sandbox")
    start_s: float = Field(default=120.0, gt=0, description="seconds that loading the target may take")
    step_s: float = Field(default=0.0, ge=0, description="seconds of a reset, step or score; 0: the target's own limit")
    split_seed: int = Field(default=0, description="draws the splits that a list of tasks does not have")
    held_out: float = Field(
        default=0.25,
        gt=0,
        lt=1,
        description="recorded: share of the customers, or tasks, whose conversations no analysis and no environment "
        "uses",
    )
    user: UserSection = Field(default=UserSection(), description="the model that is the user, if the target needs one")

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if len(name) > TARGET_NAME_LENGTH or not TARGET_NAME.fullmatch(name):
            raise ValueError(
                f"the name of a target has 1 to {TARGET_NAME_LENGTH} characters, begins with a letter or digit, and"
                " contains only letters A-Z and a-z, digits and . _ : -"
            )
        return name


class ModelSection(Section):
    """The frozen base model."""

    spec: str = Field(
        default=BUNDLED,
        description='"bundled", "bundled-large", "bundled-textworld", "smollm2" (extra), or the directory of a '
        "causal LM",
    )
    predecessor: str = Field(
        default="",
        description="the base model whose live system this one is to take over from; traced requalify sets it",
    )


class SandboxSection(Section):
    """Limits of the containers that run synthetic environments."""

    memory_mb: int = Field(default=256, ge=32, le=16384, description="memory of a container, MiB; without swap")
    cpus: float = Field(default=1.0, ge=0.1, le=64, description="processors of a container")
    pids: int = Field(default=32, ge=4, le=1024, description="processes and threads of a container")
    tmp_mb: int = Field(default=16, ge=1, le=1024, description="files of a container, MiB; they count as its memory")
    open_files: int = Field(default=64, ge=16, le=4096, description="open files per process")
    message_kb: int = Field(
        default=1024, ge=16, le=65536, description="maximum size of a message, and of all replies of an episode, KiB"
    )
    call_seconds: float = Field(default=5.0, ge=0.05, le=600, description="seconds for a reset, step or score")
    start_seconds: float = Field(default=60.0, ge=1, le=600, description="seconds for a container to start")


class TelemetrySection(Section):
    """Export of spans to an OpenTelemetry collector (needs the extra otel)."""

    endpoint: str = Field(
        default="",
        description='OTLP/HTTP URL, e.g. "http://localhost:4318"; "": OTEL_EXPORTER_OTLP_ENDPOINT, if set',
    )


class Settings(BaseSettings):
    """All settings; ``data_dir`` is absolute."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    data_dir: Path = Field(default=Path("traced-data"), description="data directory")
    seed: int = Field(default=0, ge=0, description="seed of all random choices")
    store: StoreSection = StoreSection()
    target: TargetSection = TargetSection()
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    collect: CollectSection = CollectSection()
    analysis: AnalysisSection = AnalysisSection()
    synthesis: SynthesisSection = SynthesisSection()
    admission: AdmissionSection = AdmissionSection()
    llm: LlmSection = LlmSection()
    training: TrainingSection = TrainingSection()
    prompting: PromptingSection = PromptingSection()
    gate: GateSection = GateSection()
    routing: RoutingSection = RoutingSection()
    composition: CompositionSection = CompositionSection()
    test: HeldOutSection = HeldOutSection()
    sandbox: SandboxSection = SandboxSection()
    retention: RetentionSection = RetentionSection()
    devices: DevicesSection = DevicesSection()
    log: LogSection = LogSection()
    service: ServiceSection = ServiceSection()
    notify: NotifySection = NotifySection()
    api: ApiSection = ApiSection()
    triggers: TriggersSection = TriggersSection()
    telemetry: TelemetrySection = TelemetrySection()
    executor: ExecutorSection = ExecutorSection()
    promotion: PromotionSection = PromotionSection()
    serving: ServingSection = ServingSection()
    outcomes: OutcomesSection = OutcomesSection()

    @property
    def store_url(self) -> str:
        """The SQLAlchemy URL of the store."""
        url = self.store.url or default_store_url(self.data_dir)
        return with_password(url, self.store.password_file) if self.store.url and self.store.password_file else url

    @property
    def threads(self) -> int:
        """CPU threads for engines and trainers."""
        return self.engine.threads or len(os.sched_getaffinity(0))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources by precedence: command line, environment, initial ``toml_file``, defaults of the model."""
        initial = dict(init_settings())
        path = initial.pop("toml_file", None)
        sources: list[PydanticBaseSettingsSource] = [
            InitSettingsSource(settings_cls, init_kwargs=initial),
            env_settings,
        ]
        if path is not None:
            sources.append(TomlConfigSettingsSource(settings_cls, toml_file=path))
        return (*(CurrentNames(settings_cls, source) for source in sources), ModelProfile(settings_cls))


class CurrentNames(PydanticBaseSettingsSource):
    """A source of settings in which renamed keys have their current names."""

    def __init__(self, settings_cls: type[BaseSettings], source: PydanticBaseSettingsSource) -> None:
        super().__init__(settings_cls)
        self._source = source

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        """Return the source's value of a field."""
        return self._source.get_field_value(field, field_name)

    def __call__(self) -> dict[str, Any]:
        """Return the source's values by current name."""
        values = self._source()
        for key in _old_keys(values):
            section, name, _ = RENAMED[key]
            log.warning("the setting %s is now %s.%s; rename it, the old name will be refused", key, section, name)
        return _with_new_names(values)


class ModelProfile(PydanticBaseSettingsSource):
    """The defaults of the base model that the sources before this one name."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        """Return no value: the profile is read as a whole."""
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        """Return the profile's values by section and key."""
        table = self.current_state.get("model")
        return dict(profile(str(table.get("spec", BUNDLED)) if isinstance(table, dict) else BUNDLED))


def load_settings(data_dir: Path | None = None, overrides: Mapping[str, object] | None = None) -> Settings:
    """Load the settings of a data directory.

    Args:
        data_dir: the data directory; by default TRACED_DATA_DIR, or ./traced-data.
        overrides: values of the command line by dotted key ({"training.lr": 1e-3}); None values are ignored.

    Raises:
        ConfigError: names the key, the value, its source and, for an unknown key, the nearest valid one.
        DataDirectoryUnusable: other users can write the data directory.
    """
    directory = data_directory(data_dir)
    path = find_settings_file(directory)
    raw = read_settings_file(path) if path else {}
    options = {key: value for key, value in (overrides or {}).items() if value is not None}
    if path:
        _refuse_unknown(_dotted(raw), f"in {path}")
    _refuse_unknown(_environment_keys(), "in the environment", as_variable=True)
    _refuse_unknown(options, "on the command line")
    try:
        values: dict[str, Any] = {"toml_file": path, "data_dir": directory, **_nested(options)}
        return Settings(**values)
    except ValidationError as error:
        raise _invalid_value(error, path, raw, options) from None


def configuration(settings: Settings) -> dict[str, Any]:
    """Return the settings on which the results of a cycle depend, as JSON."""
    # Without an LLM the section is left out, so that the configuration equals that of cycles from before it existed.
    values = settings.model_dump(mode="json", exclude={**dict.fromkeys(EXCLUDED_SECTIONS, True), **EXCLUDED_KEYS})
    values["target"][TARGET_START] = _start_digest(settings)
    analysts = (values["analysis"].get("analyst"), values["synthesis"]["synthesizer"])
    return values if "llm" in analysts else {name: section for name, section in values.items() if name != "llm"}


def _start_digest(settings: Settings) -> str:
    """Return a digest of what determines a target's world; "" for one that its name alone stands for."""
    values = settings.target.model_dump(mode="json", exclude_defaults=True, include=set(START_KEYS))
    values = {key: value for key, value in {**_added_table(settings), **values}.items() if not key.endswith("_s")}
    file = factory_file(values.get("factory", ""))
    if file is not None:
        with suppress(OSError):
            values["source"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12] if values else ""


def factory_file(factory: str) -> Path | None:
    """Return the file of ``FILE.py`` or ``FILE.py:function``, None for ``module:function``."""
    place = re.fullmatch(r"(.+\.py)(:\w+)?", factory)
    return Path(os.path.expanduser(place[1])) if place else None


def target_table(data_dir: Path, name: str) -> Path:
    """Return the file of a target that ``traced target add`` has added."""
    return data_dir / TARGETS / f"{name}.toml"


def _added_table(settings: Settings) -> dict[str, Any]:
    """Return how the target of a name that was added is started; nothing for any other, and for a file that is none."""
    if settings.target.kind:
        return {}
    try:
        table = tomllib.loads(target_table(settings.data_dir, settings.target.name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in table.items() if key in START_KEYS}


def start_overrides(settings: Settings) -> dict[str, Any]:
    """Return how the target is started, by dotted key, for a process that works on a cycle.

    The table of an added target is part of it, so that all stages of a run have the same.
    """
    values = {key: getattr(settings.target, key) for key in START_KEYS}
    changed_keys = settings.target.model_dump(exclude_defaults=True)
    values |= {key: value for key, value in _added_table(settings).items() if key not in changed_keys}
    return {f"target.{key}": value for key, value in values.items()}


# What versions without a key did, where that is not its default. Trainings of such cycles go on as they began.
BEFORE_THE_KEY = {"training": {"validate_every": 0, "open_share": 0.0, "recoveries": 0}}


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a stored cycle, with what holds for keys that its version did not have."""
    values = _merge(_with_new_names(config), BEFORE_THE_KEY)
    return _merge(values, configuration(Settings.model_construct()))


def _old_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of values by section that have been renamed."""
    tables = {key: config.get(key.partition(".")[0]) for key in RENAMED}
    return [key for key, table in tables.items() if isinstance(table, dict) and key.partition(".")[2] in table]


def _with_new_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by section with the current names of renamed keys."""
    values = dict(config)
    for key in _old_keys(values):
        old_section, _, old_name = key.partition(".")
        section, name, convert = RENAMED[key]
        table = dict(values[old_section])
        value = convert(table.pop(old_name))
        values[old_section] = table
        values[section] = {name: value, **values.get(section, {})}
    return values


def _merge(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    nested_keys = {key for key in values.keys() & defaults.keys() if isinstance(values[key], dict)}
    return {**defaults, **values, **{key: _merge(values[key], defaults[key]) for key in nested_keys}}


def child_environment(pairs: Sequence[str]) -> dict[str, str]:
    """Return ``--set`` pairs as environment variables, so that child processes use the same settings."""
    valid = {*valid_keys(), *RENAMED}
    pairs_by_key = [(key.strip(), value) for key, _, value in (pair.partition("=") for pair in pairs)]
    return {_variable(key): value.strip().strip("\"'") for key, value in pairs_by_key if key in valid}


def valid_keys() -> list[str]:
    """Return all dotted keys of the settings file."""
    return [key for key, _ in _fields()]


def agent_settings(name: str) -> dict[str, object]:
    """Return what ``traced init --agent`` sets for an agent of which there are conversations alone, as dotted keys.

    The service runs the router, a cycle begins after 200 new conversations, and an adapter proves itself on a share of
    the traffic, because no episode of the target can be played.
    """
    return {
        "target.name": name,
        "target.kind": "recorded",
        "promotion.policy": "canary",
        "triggers.trajectories": 200,
        "serving.with_service": True,
    }


def template(spec: str = BUNDLED, agent: str = "") -> str:
    """Return a ``traced.toml`` with all keys at the defaults of a base model, commented out and described.

    The model itself is no comment unless it is the bundled one, so that the file's defaults are those that hold. With
    the name of an agent, ``agent_settings`` are no comments either.
    """
    lines = ["# traced: settings of this data directory. Remove a '#' to change a default."]
    lines += [
        f"# The defaults are those of the model {_toml(spec)}; traced init --print --model MODEL prints others.",
        "",
    ]
    section, values = "", _dotted(profile(spec))
    fixed_values = agent_settings(agent) if agent else {}
    if spec != BUNDLED:
        fixed_values["model.spec"] = spec
    for key, (default, description) in _fields():
        table, _, name = key.rpartition(".")
        if table != section:
            lines += ["", f"# {_title(table)}", f"[{table}]"]
            section = table
        value = fixed_values.get(key, values.get(key, default))
        lines.append(f"{'' if key in fixed_values else '# '}{name} = {_toml(value)}  # {description}")
    return "\n".join(lines) + "\n"


def _fields(model: type[BaseModel] | None = None, prefix: str = "") -> Iterator[tuple[str, tuple[object, str]]]:
    for name, field in (model or Settings).model_fields.items():
        if isinstance(field.default, Section):
            yield from _fields(type(field.default), f"{prefix}{name}.")
        elif name not in NOT_IN_FILE:
            yield prefix + name, (field.default, field.description or "")


def _title(table: str) -> str:
    section: Any = Settings
    for name in table.split("."):
        section = section.model_fields[name].annotation
    return (section.__doc__ or "").rstrip(".")


def _toml(value: object) -> str:
    if isinstance(value, str):
        # A basic string of TOML has JSON's escapes.
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    return "[]" if value == () else str(value)


def _dotted(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _dotted(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _nested(flat: Mapping[str, object]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return table


def _environment_keys() -> dict[str, str]:
    names = [name for name in os.environ if name.startswith(ENV_PREFIX) and name not in NON_SETTING_VARIABLES]
    return {name.removeprefix(ENV_PREFIX).lower().replace("__", "."): os.environ[name] for name in names}


def _variable(key: str) -> str:
    return ENV_PREFIX + key.replace(".", "__").upper()


def _refuse_unknown(flat: Mapping[str, object], source: str, *, as_variable: bool = False) -> None:
    valid = valid_keys()
    for key in flat:
        if key in valid or key in RENAMED:
            continue
        if key in REMOVED:
            raise ConfigError(
                f'"{_variable(key) if as_variable else key}" {source} was removed: remove it, and give every person a'
                " token of their own",
                hint=REMOVED[key],
            )
        nearest_key = _nearest(key, valid)
        display_key, display_nearest = (_variable(key), _variable(nearest_key)) if as_variable else (key, nearest_key)
        raise ConfigError(
            f'unknown key "{display_key}" {source}; nearest valid key: "{display_nearest}"', hint="traced init --print"
        )


def _nearest(key: str, valid: list[str]) -> str:
    name = key.rpartition(".")[2]
    same_name = [candidate for candidate in valid if candidate.rpartition(".")[2] == name]
    return (
        difflib.get_close_matches(key, valid, n=1, cutoff=0.75)
        or same_name
        or difflib.get_close_matches(key, valid, n=1, cutoff=0)
    )[0]


def _invalid_value(
    error: ValidationError, path: Path | None, raw: Mapping[str, object], options: Mapping[str, object]
) -> ConfigError:
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    key = ".".join(str(part) for part in first["loc"])
    source = f"in {path}"
    if key in options:
        source = "on the command line"
    elif key in _environment_keys():
        source = f"in the variable {_variable(key)}"
    elif key not in _dotted(raw):
        source = "in the settings"
    is_shown = not key.startswith(SECRET_PREFIXES) and not isinstance(first["input"], dict)
    value = f" = {redacted(first['input'])!r}" if is_shown else ""
    return ConfigError(f"{key}{value} {source}: {message[:1].lower()}{message[1:]}", hint="traced init --print")
