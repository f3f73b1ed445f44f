"""What the project must reach, measured: one module a topic, named on the command line of `measure.py`."""
