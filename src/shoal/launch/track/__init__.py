"""Trackers, fed by the launcher from ``metrics.jsonl``: TensorBoard, W&B, MLflow, trackio; and Prometheus."""
