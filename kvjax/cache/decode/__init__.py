"""While decoding: which token leaves."""
