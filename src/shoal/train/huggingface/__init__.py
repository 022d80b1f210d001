"""A run's weights as a Hugging Face model directory: safetensors, config, generation config, tokenizer, template."""
