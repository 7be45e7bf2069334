"""Operations on whole caches: take and join sequences, edit, extend a shared prefix, save."""
