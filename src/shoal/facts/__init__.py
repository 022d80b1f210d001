"""Inputs and decisions that every package shares: model, cluster, recipe, layout, config. Never imports torch."""
