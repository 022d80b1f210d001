"""Jobs for the engines that clusters have: one file per target, each writes, submits, watches and cancels a job."""
