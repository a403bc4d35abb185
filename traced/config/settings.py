"""Settings of one data directory: defaults < ``traced.toml`` < environment (``TRACED_TRAINING__LR``) < command line.

Invariants: every key has a default and a description, and ``template()`` is generated from them, so that the file
``traced init`` writes cannot drift from the code. The data directory itself is not a key of the file, because the file
is looked up in it: ``--data-dir``, then ``TRACED_DATA_DIR``, then ``./traced-data``. A ``traced.toml`` in the data
directory wins over one in the working directory; the two are never merged.

How it fails: ``ConfigError`` names the key, the value, the file (or variable, or option) it came from and, for an
unknown key, the nearest valid one. Not covered: secrets; keys that end in ``_file`` name the
files that hold them.
"""

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from traced.config.cycle_sections import (
    PACE_AND_KEY,
    AdmissionSection,
    AnalysisSection,
    CollectSection,
    GateSection,
    HeldOutSection,
    LlmSection,
    OutcomesSection,
    PromotionSection,
    PromptingSection,
    RoutingSection,
    SynthesisSection,
    TrainingSection,
)
from traced.config.section import Positive, Section, Temperature
from traced.config.service_sections import (
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
from traced.core.location import FILE_NAME as FILE_NAME
from traced.core.location import data_directory as data_directory
from traced.core.location import default_url, read_file, with_password
from traced.core.location import find_file as find_file

ENV_PREFIX = "TRACED_"
NOT_IN_FILE = {"data_dir"}
_ASKED = ("llm", "outcomes.judge")
SECRET = ("notify.", *(f"{one}.{key}" for one in _ASKED for key in ("base_url", "api_key")))  # no error shows one
SERVICE = ("executor", "log", "service", "notify", "api", "triggers", "telemetry", "serving", "outcomes", "promotion")
APART = ("data_dir", "store", "seed", "retention", "devices", "prompting", *SERVICE)
WITHOUT_EFFECT: dict[str, Any] = {  # on what a cycle's stations find: how fast, how often, and when to give up
    "engine": {"threads", "start_timeout_s"},
    "synthesis": {"starts", "candidates", "repairs", "file_tokens", "max_tokens", "max_cost", "max_minutes"},
    "llm": PACE_AND_KEY,
}
OTHER_VARIABLES = {
    "TRACED_DATA_DIR",
    "TRACED_DEBUG",
    "TRACED_DOCKERD_LOG",
    "TRACED_DOCKER_SOCKET",
    "TRACED_VLLM_PYTHON",
}


class StoreSection(Section):
    """Where everything that is known is kept."""

    url: str = Field(default="", description='SQLAlchemy URL; "" is SQLite in the data directory')
    password_file: str = Field(
        default="", description="file that holds the password for the URL, so that it can go without"
    )


class TargetSection(Section):
    """Where better behaviour is wanted."""

    name: str = Field(default="desk", description="target environment")


class ModelSection(Section):
    """The frozen base model."""

    spec: str = Field(
        default="bundled", description='"bundled", "smollm2" (extra), or a Hugging Face causal LM directory'
    )


class EngineSection(Section):
    """The inference server."""

    threads: int = Field(default=0, ge=0, description="CPU threads; 0 is every core this process may use")
    max_batch: Positive = Field(default=64, description="sequences decoded together")
    max_length: Positive = Field(default=2048, description="tokens of one conversation, prompt included")
    max_tokens: Positive = Field(default=256, description="tokens of one completion")
    temperature: Temperature = Field(default=0.0, description="for evaluation; 0 is greedy")
    start_timeout_s: float = Field(default=120.0, gt=0, description="seconds to wait for the server to answer")


class SandboxSection(Section):
    """Limits of the containers that run synthetic environments, within the bounds of ``sandbox.policy``."""

    memory_mb: int = Field(default=256, ge=32, le=16384, description="memory of one container, MiB; no swap")
    cpus: float = Field(default=1.0, ge=0.1, le=64, description="processors of one container")
    pids: int = Field(default=32, ge=4, le=1024, description="processes and threads in one container")
    tmp_mb: int = Field(default=16, ge=1, le=1024, description="files of one container, MiB; they count as its memory")
    open_files: int = Field(default=64, ge=16, le=4096, description="files that one process may have open")
    message_kb: int = Field(default=1024, ge=16, le=65536, description="one message, and one episode's answers, KiB")
    call_seconds: float = Field(default=5.0, ge=0.05, le=600, description="seconds for one reset, step or score")
    start_seconds: float = Field(default=60.0, ge=1, le=600, description="seconds for a container to start")


class TelemetrySection(Section):
    """Spans for an OpenTelemetry collector (extra otel)."""

    endpoint: str = Field(
        default="", description='OTLP/HTTP, e.g. "http://localhost:4318"; "" is OTEL_EXPORTER_OTLP_ENDPOINT, if set'
    )


class Settings(BaseSettings):
    """Everything a verb needs to know; ``data_dir`` is absolute."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    data_dir: Path = Field(default=Path("traced-data"), description="data directory")
    seed: int = Field(default=0, ge=0, description="every random choice derives from it")
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
        """The store's SQLAlchemy URL."""
        url = self.store.url or default_url(self.data_dir)
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
        """Command line, then environment, then the file named by ``toml_file`` among the initial values."""
        given = dict(init_settings())
        path = given.pop("toml_file", None)
        sources: list[PydanticBaseSettingsSource] = [InitSettingsSource(settings_cls, init_kwargs=given), env_settings]
        if path is not None:
            sources.append(TomlConfigSettingsSource(settings_cls, toml_file=path))
        return tuple(sources)


def load_settings(data_dir: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Settings for ``data_dir`` (or TRACED_DATA_DIR, or ./traced-data), with ``overrides`` from the command line.

    ``overrides`` maps dotted keys to values ({"training.lr": 1e-3}); None values mean "not given".
    Raises ConfigError.
    """
    directory = data_directory(data_dir)
    path = find_file(directory)
    raw = read_file(path) if path else {}
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    if path:
        _refuse_unknown(_dotted(raw), f"in {path}")
    _refuse_unknown(_environment_keys(), "in the environment", as_variable=True)
    _refuse_unknown(given, "on the command line")
    try:
        values: dict[str, Any] = {"toml_file": path, "data_dir": directory, **_nested(given)}
        return Settings(**values)
    except ValidationError as error:
        raise _bad_value(error, path, raw, given) from None


def configuration(settings: Settings) -> dict[str, Any]:
    """The settings that a cycle's results depend on, as JSON: neither where it is kept nor how the service is run.

    Where neither analyst nor synthesizer is a language model nothing of it is told, as in cycles from before there
    was one.
    """
    told = settings.model_dump(mode="json", exclude={**dict.fromkeys(APART, True), **WITHOUT_EFFECT})
    thinking = (told["analysis"].get("analyst"), told["synthesis"]["synthesizer"])
    return told if "llm" in thinking else {name: section for name, section in told.items() if name != "llm"}


def filled(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that a cycle began with; keys that its version did not know yet have their defaults."""
    return _filled(stored, configuration(Settings.model_construct()))


def _filled(stored: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    both = {key for key in stored.keys() & defaults.keys() if isinstance(stored[key], dict)}
    return {**defaults, **stored, **{key: _filled(stored[key], defaults[key]) for key in both}}


def for_children(pairs: Sequence[str]) -> dict[str, str]:
    """``--set`` pairs as environment variables, so that a service's children work with the same store and threads."""
    known = valid_keys()
    named = [(key.strip(), value) for key, _, value in (pair.partition("=") for pair in pairs)]
    return {_variable(key): value.strip().strip("\"'") for key, value in named if key in known}


def valid_keys() -> list[str]:
    """Every dotted key that the file may hold."""
    return [key for key, _ in _fields()]


def template() -> str:
    """A ``traced.toml`` with every key at its default, commented out and explained."""
    lines = ["# traced: settings of this data directory. Remove a '#' to change a default.", ""]
    section = ""
    for key, (default, description) in _fields():
        table, _, name = key.rpartition(".")
        if table != section:
            lines += ["", f"# {_title(table)}", f"[{table}]"]
            section = table
        lines.append(f"# {name} = {_toml(default)}  # {description}")
    return "\n".join(lines) + "\n"


def _fields(model: type[BaseModel] | None = None, prefix: str = "") -> Iterator[tuple[str, tuple[Any, str]]]:
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


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool):
        return str(value).lower()
    return "[]" if value == () else str(value)


def _dotted(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _dotted(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return table


def _environment_keys() -> dict[str, str]:
    names = [name for name in os.environ if name.startswith(ENV_PREFIX) and name not in OTHER_VARIABLES]
    return {name.removeprefix(ENV_PREFIX).lower().replace("__", "."): os.environ[name] for name in names}


def _variable(key: str) -> str:
    return ENV_PREFIX + key.replace(".", "__").upper()


def _refuse_unknown(flat: Mapping[str, Any], where: str, *, as_variable: bool = False) -> None:
    known = valid_keys()
    for key in flat:
        if key in known:
            continue
        near = _nearest(key, known)
        shown, nearest = (_variable(key), _variable(near)) if as_variable else (key, near)
        raise ConfigError(f'unknown key "{shown}" {where}; nearest valid key: "{nearest}"', hint="traced init --print")


def _nearest(key: str, known: list[str]) -> str:
    name = key.rpartition(".")[2]
    by_name = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    return (
        difflib.get_close_matches(key, known, n=1, cutoff=0.75)
        or by_name
        or difflib.get_close_matches(key, known, n=1, cutoff=0)
    )[0]


def _bad_value(error: ValidationError, path: Path | None, raw: dict[str, Any], given: Mapping[str, Any]) -> ConfigError:
    first = error.errors()[0]
    said = first["msg"].removeprefix("Value error, ")
    key = ".".join(str(part) for part in first["loc"])
    where = f"in {path}"
    if key in given:
        where = "on the command line"
    elif key in _environment_keys():
        where = f"in the variable {_variable(key)}"
    elif key not in _dotted(raw):
        where = "in the settings"
    value = "" if key.startswith(SECRET) or isinstance(first["input"], dict) else f" = {first['input']!r}"
    return ConfigError(f"{key}{value} {where}: {said[:1].lower()}{said[1:]}", hint="traced init --print")
