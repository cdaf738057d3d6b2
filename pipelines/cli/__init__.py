"""The command line: Hydra around pipelines/main.py, errors in two lines, sweeps."""
