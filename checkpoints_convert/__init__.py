"""Hugging Face checkpoints to kvjax directories: `python -m checkpoints_convert --help`."""
