"""Offload: what is kept in host memory or on local disks between its uses on the device."""
