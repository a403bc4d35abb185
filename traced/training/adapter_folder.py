"""Write the adapter of a PEFT model as a folder in PEFT's layout."""

from pathlib import Path
from typing import Any


def save_adapter(model: Any, folder: Path) -> None:
    """Write configuration and weights; the same adapter gives the same bytes.

    The configuration holds the base's name, not its path, so the folder can be moved and compared.
    """
    config = model.peft_config["default"]
    # PEFT keeps a set, whose order differs between processes; adapter files must be reproducible.
    config.target_modules = sorted(config.target_modules)
    if config.target_parameters:
        config.target_parameters = sorted(config.target_parameters)
    base_path = config.base_model_name_or_path
    config.base_model_name_or_path = Path(base_path or "").name
    try:
        model.save_pretrained(folder, save_embedding_layers=False)
    finally:
        # PEFT reads the base's files from there when it saves a checkpoint.
        config.base_model_name_or_path = base_path
    (folder / "README.md").unlink()  # PEFT's empty model card
