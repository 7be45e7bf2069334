"""What a KV-cache method is: the protocol, its components, and how they compose."""
