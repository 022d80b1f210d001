"""Jobs for the engines of clusters: one file per target; each writes, submits, watches and cancels a job."""
