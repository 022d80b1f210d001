"""What is given and what is decided once: model, cluster, recipe, layout, config. Never imports torch."""
