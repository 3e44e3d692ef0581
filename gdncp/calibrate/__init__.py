"""Measuring what a machine takes, for the cost model; `python -m gdncp.calibrate --help`."""
