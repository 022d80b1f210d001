"""Offload: what waits off the device between its uses, in the host's memory or on its disks."""
