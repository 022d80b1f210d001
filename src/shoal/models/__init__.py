"""The networks: one decoder for Llama, Mistral, Qwen2, Qwen3, GPT-2 and NeoX."""
