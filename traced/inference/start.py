"""Start the engine that the settings name; used by the pipeline, the trainer and the gateway."""

from traced.config.settings import Settings
from traced.inference.engine_process import EngineProcess, VllmOptions, start_embedded, start_vllm
from traced.inference.model_files import resolve_model


def start(settings: Settings, engine: str, port: int = 0) -> EngineProcess:
    """Start an engine that serves the base model on the loopback, and wait until it answers.

    Args:
        engine: "embedded" or "vllm", as in ``serving.engine``.
        port: 0 means a free port, which only the embedded engine supports.

    Raises:
        EngineStartError: The engine did not start.
        ModelError: The model of the settings is missing or incomplete.
    """
    model = resolve_model(settings.model.spec, settings.data_dir).path
    limits, serving = settings.engine, settings.serving
    if engine != "vllm":
        return start_embedded(
            model,
            data_dir=settings.data_dir,
            port=port,
            threads=settings.threads,
            max_batch=limits.max_batch,
            max_length=limits.max_length,
            timeout_s=limits.start_timeout_s,
        )
    options = VllmOptions(
        model,
        serving.max_adapters,
        settings.training.lora_r,
        limits.max_length,
        serving.tool_parser,
        serving.vllm_args,
        serving.sleep_for_training,
    )
    return start_vllm(
        options,
        data_dir=settings.data_dir,
        port=port,
        timeout_s=limits.start_timeout_s,
        python=serving.vllm_python,
    )
