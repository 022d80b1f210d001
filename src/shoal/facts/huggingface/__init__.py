"""Hugging Face's ``config.json``, read and written: the same shape in their words and in ours."""

from shoal.facts.huggingface.read import read_config
from shoal.facts.huggingface.write import write_config

__all__ = ["read_config", "write_config"]
