"""The networks: one decoder that is Llama, Mistral, Qwen2, Qwen3, GPT-2 and NeoX."""
