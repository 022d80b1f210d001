"""Read and write Hugging Face's ``config.json``."""

from shoal.facts.model.huggingface.read import read_config
from shoal.facts.model.huggingface.write import write_config

__all__ = ["read_config", "write_config"]
