"""Conversion of Hugging Face and GGUF checkpoints to kvjax directories: `python -m checkpoints_convert --help`."""
