"""Operations on whole caches: take, fork and join sequences, crop, edit, extend a shared prefix, save."""
