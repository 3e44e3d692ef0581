"""Simulation of plans on machines of any size; `python -m gdncp.simulate --help`."""
