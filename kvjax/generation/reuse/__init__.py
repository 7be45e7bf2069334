"""Keys and values of texts that were read elsewhere, put together and read again only in part."""
